// The ranks of one tensor-parallel group: processes that hold shares of a model and add up their partial sums
// in memory that they map together.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int kMaxRanks = 64;

// At the start of the shared memory, which is zero at first.
struct GroupHeader {
    struct alignas(64) Arrived {
        std::atomic<uint64_t> meetings;
    };
    alignas(64) std::atomic<uint32_t> lost;
    Arrived arrived[kMaxRanks];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share these counters");

// Shared floats: partial sums [2 halves][ranks][rows][width], then logits [rows][vocab].
struct GroupShape {
    int32_t ranks, rows, width, vocab;
    size_t partial_floats() const { return (size_t)rows * width; }
    size_t logits_offset() const { return (sizeof(GroupHeader) + 2 * ranks * partial_floats() * sizeof(float) + 4095) / 4096 * 4096; }
    size_t bytes() const { return logits_offset() + (size_t)rows * vocab * sizeof(float); }
};

class Group {
  public:
    // patience: seconds that a meeting may take before this rank gives the group up; 0 = no limit.
    Group(uint8_t* memory, const GroupShape& shape, int rank, double patience);

    // Numbers the meetings that follow by a pass's number, which grows. A rank that takes no part in a pass does not
    // hold the others back for longer than until its next one: they end what it left with worthless sums, in their
    // own memory alone, and meet it there.
    void begin(uint64_t pass) noexcept;

    // Where this rank's next partial sums go.
    float* partial() const { return half(writing_) + rank_ * shape_.partial_floats(); }

    // Waits until every rank has come as far, and makes what they wrote readable. One thread of a rank calls it while
    // the others wait. A half is written again two meetings later, when every rank has come to a meeting after the
    // one whose sums it read.
    void meet() noexcept;

    // Whether a meeting failed: for good, and the same for all threads that look after one meeting.
    bool lost() const { return lost_; }
    // Ends the meetings of all ranks; from any thread.
    void abandon() noexcept { header_->lost.store(1, std::memory_order_release); }

    // out[:width] = the ranks' partial sums of one row, added in rank order: the same bits on every rank.
    void sum(int row, float* out) const noexcept;

    // This rank's share of `count` units.
    int begin(int count) const { return (int)((int64_t)count * rank_ / shape_.ranks); }
    int end(int count) const { return (int)((int64_t)count * (rank_ + 1) / shape_.ranks); }

  private:
    float* half(int which) const { return floats_ + which * shape_.ranks * shape_.partial_floats(); }
    bool wait_for(int rank) noexcept;

    GroupHeader* const header_;
    float* const floats_;
    const GroupShape shape_;
    const int rank_;
    const double patience_;
    uint64_t meetings_ = 0;
    int writing_ = 0, reading_ = 1;
    bool lost_ = false;
};

}  // namespace paceline
