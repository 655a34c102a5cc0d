#include "team.h"

#include "simd.h"
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace paceline {

namespace {

constexpr int kStageSpins = 4000;
constexpr int kIdleSpins = 1000;

#if defined(__linux__)
bool pin_to(int core) {
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    CPU_SET(core, &wanted);
    return pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted) == 0;
}

// Pins the calling thread for its lifetime and restores what was there before.
class Pin {
  public:
    explicit Pin(int core) {
        if (pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0) pinned_ = pin_to(core);
    }
    ~Pin() {
        if (pinned_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
    }

  private:
    cpu_set_t before_;
    bool pinned_ = false;
};
#else
bool pin_to(int) { return false; }
struct Pin {
    explicit Pin(int) {}
};
#endif

}  // namespace

void Gate::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

void Gate::wait_beyond(uint32_t seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (value() != seen) return;
        pause();
    }
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
    }
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(int threads, const int* cores, int num_cores) : size_(threads), cores_(cores, cores + num_cores), taken_(new Taken[threads]) {
    try {
        for (int i = 1; i < size_; i++) threads_.emplace_back([this, i] { worker(i); });
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() {
    stop_ = true;
    start_.advance();
    for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
    std::lock_guard<std::mutex> lock(running_);
    job_ = &job;
    start_.advance();
    if (cores_.empty()) {
        job(0);
    } else {
        Pin pin(cores_[0]);
        job(0);
    }
    barrier();
}

void Team::worker(int index) {
    if (!cores_.empty()) pin_to(cores_[index % cores_.size()]);
    uint32_t seen = 0;
    for (;;) {
        start_.wait_beyond(seen, kIdleSpins);
        seen++;
        if (stop_) return;
        (*job_)(index);
        barrier();
    }
}

void Team::barrier() {
    uint32_t seen = stage_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        for (int i = 0; i < size_; i++) taken_[i].count.store(0, std::memory_order_relaxed);
        stage_.advance();
        return;
    }
    stage_.wait_beyond(seen, kStageSpins);
}

}  // namespace paceline
