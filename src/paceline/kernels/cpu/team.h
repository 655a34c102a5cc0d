// A team of threads that runs one job at a time. The caller of run() is worker 0.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
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
    // Throws std::system_error when the system refuses a thread.
    Team(int threads, const int* cores, int num_cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    // Calls job(worker) on every worker, 0 being the caller, and returns when all have returned. It must not throw.
    void run(const std::function<void(int)>& job);

    // Called by every worker inside a job: does [0, count) between them and returns when all of it is done, so it
    // is a barrier too. A worker takes a run of neighbours, for the sake of memory streams, then helps the others.
    template <class F> void each(int worker, int count, F&& f) {
        for (int i = 0; i < size_; i++) {
            const int owner = (worker + i) % size_;
            const int begin = (int)((int64_t)count * owner / size_), end = (int)((int64_t)count * (owner + 1) / size_);
            if (begin == end) continue;
            for (;;) {
                const int at = begin + taken_[owner].count.fetch_add(1, std::memory_order_relaxed);
                if (at >= end) break;
                f(at);
            }
        }
        barrier();
    }

  private:
    struct alignas(64) Taken {
        std::atomic<int> count{0};
    };
    void barrier();
    void worker(int index);
    void stop();

    const int size_;
    std::vector<int> cores_;
    std::unique_ptr<Taken[]> taken_;
    std::vector<std::thread> threads_;
    std::mutex running_;
    const std::function<void(int)>* job_ = nullptr;
    bool stop_ = false;
    Gate start_;
    Gate stage_;
    alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace paceline
