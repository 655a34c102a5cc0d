#include "group.h"

#include <time.h>

#include <algorithm>
#include <new>

#include "decoder.h"
#include "simd.h"

namespace paceline {

namespace {

// Ranks that run side by side meet within microseconds; a rank that shares its core with another must let it run.
constexpr int kMeetingSpins = 2000;
constexpr long kNapNanoseconds = 20'000;
// More than twice the layers of any model.
constexpr int kMeetingBits = 20;
// A process that was stopped for an hour has waited for one nap.
constexpr double kLongestNap = 0.1;

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

}  // namespace

Group::Group(uint8_t* memory, const GroupShape& shape, int rank, double patience)
    : header_(reinterpret_cast<GroupHeader*>(memory)), floats_(reinterpret_cast<float*>(memory + sizeof(GroupHeader))),
      shape_(shape), rank_(rank), patience_(patience) {}

void Group::begin(uint64_t pass) noexcept {
    meetings_ = pass << kMeetingBits;
    writing_ = 0;
    reading_ = 1;
}

void Group::meet() noexcept {
    meetings_++;
    header_->arrived[rank_].meetings.store(meetings_, std::memory_order_release);
    for (int r = 0; r < shape_.ranks && !lost_; r++)
        if (!wait_for(r)) {
            abandon();
            lost_ = true;
        }
    reading_ = writing_;
    writing_ ^= 1;
}

bool Group::wait_for(int rank) noexcept {
    const std::atomic<uint64_t>& theirs = header_->arrived[rank].meetings;
    for (int i = 0; i < kMeetingSpins; i++) {
        if (theirs.load(std::memory_order_acquire) >= meetings_) return true;
        pause();
    }
    double waited = 0, before = now();
    while (theirs.load(std::memory_order_acquire) < meetings_) {
        if (header_->lost.load(std::memory_order_acquire)) return false;
        const timespec nap{0, kNapNanoseconds};
        nanosleep(&nap, nullptr);
        const double after = now();
        waited += std::min(after - before, kLongestNap);
        before = after;
        if (patience_ > 0 && waited > patience_) return false;
    }
    return true;
}

void Group::sum(int row, float* out) const noexcept {
    const float* first = half(reading_) + (size_t)row * shape_.width;
    for (int i = 0; i < shape_.width; i += 16) {
        v16f total = load(first + i);
        for (int r = 1; r < shape_.ranks; r++) total += load(first + r * shape_.partial_floats() + i);
        store(out + i, total);
    }
}

}  // namespace paceline

using paceline::Decoder;
using paceline::Group;
using paceline::GroupShape;

// The part of the C interface that shared_group.py mirrors.
extern "C" {

int32_t paceline_group_most_ranks() { return paceline::kMaxRanks; }

int64_t paceline_group_bytes(const GroupShape* shape) { return (int64_t)shape->bytes(); }

int64_t paceline_group_logits_offset(const GroupShape* shape) { return (int64_t)shape->logits_offset(); }

// Null when memory ran out.
Group* paceline_group_new(uint8_t* memory, const GroupShape* shape, int32_t rank, double patience) {
    return new (std::nothrow) Group(memory, *shape, rank, patience);
}

void paceline_group_free(Group* group) { delete group; }

void paceline_group_begin(Group* group, uint64_t pass) { group->begin(pass); }

void paceline_group_abandon(Group* group) { group->abandon(); }

int32_t paceline_group_lost(const Group* group) { return group->lost(); }

// From now on the decoder's passes meet those of the other ranks. The group must outlive them.
void paceline_decoder_join(Decoder* decoder, Group* group) { decoder->join(group); }
}
