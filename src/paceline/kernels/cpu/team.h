// A team of threads that runs one job at a time. The caller of run() is worker 0.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// A counter that threads wait on: they spin for a while, then sleep.
class Gate {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void advance();
    void wait_beyond(uint32_t seen, int spins);

  private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

class Team {
  public:
    Team(int threads, const int* cores, int num_cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    void run(const std::function<void()>& job);

    // Called by every worker inside a job. Work is handed out in pieces of `grain`; the call returns when all of
    // [0, count) is done, so it is a barrier too.
    template <class F> void each(int count, int grain, F&& f) {
        for (;;) {
            int begin = next_.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            int end = begin + grain < count ? begin + grain : count;
            for (int i = begin; i < end; i++) f(i);
        }
        barrier();
    }

  private:
    void barrier();
    void worker(int index);

    const int size_;
    std::vector<int> cores_;
    std::vector<std::thread> threads_;
    std::mutex running_;
    const std::function<void()>* job_ = nullptr;
    bool stop_ = false;
    Gate start_;
    Gate stage_;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace paceline
