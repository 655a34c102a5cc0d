// Attention of new tokens over cached slots.
//
// A token's positions are taken in blocks of 32 aligned to absolute positions, blocks in segments of 128. Inside a
// segment the softmax runs online over blocks; segments are merged in order. All of it depends on the token's
// position and window alone, never on the tokens that share a block's loads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace paceline {

constexpr int kBlock = 32;  // two vectors
constexpr int kSegment = 128;
constexpr int kMaxQueries = 48;  // query heads x tokens that share one block's loads

struct Batch {
    int32_t tokens_count, logits_count, paths_count, rows_count, table_width;
    int64_t table_stride;
    const int32_t *tokens, *positions, *slots, *rows, *prefix_len, *path_start, *path_len, *path_slots, *tables, *logit_rows;

    int32_t slot_of(int token, int position) const {
        if (position < prefix_len[token]) return tables[rows[token] * table_stride + position];
        return path_slots[path_start[token] + position - prefix_len[token]];
    }
};

struct HeadShape {
    int heads, kv_heads, head_dim;
    float scale;
    int group() const { return heads / kv_heads; }
    // One partial result: the weighted values (padded), then the maximum and the sum.
    int state_floats() const { return (int)round_up(head_dim, 16) + 16; }
};

// Consecutive tokens of one row whose blocks below `shared_end` are the same slots.
struct TokenGroup {
    int first, count, shared_end, end;
};

struct Cache {
    uint8_t *keys, *values;  // one layer: [slots, kv_heads, head_dim]
};

struct AttentionPlan {
    std::vector<TokenGroup> groups;
    int segments = 1;    // partial results per token and head
    bool split = false;  // a segment is a unit of work; otherwise one unit runs and merges all of them
    int head_parts = 1;  // 1: a unit runs all heads, so that it reads whole slots; otherwise one key-value head each
    int units() const { return (int)groups.size() * head_parts * (split ? segments : 1); }
};

AttentionPlan plan_attention(const Batch& batch, const HeadShape& shape, int threads);

// Grows, never shrinks: what is there keeps its place and its contents.
template <class T> void grow(std::vector<T>& v, size_t count) {
    if (v.size() < count) v.resize(count);
}

// Buffers of one worker, reused between units.
struct AttentionScratch {
    std::vector<uint32_t> keys, values, queries;
    std::vector<float> states;
    // Makes room for every unit of the plan: units run on threads of the team, where an allocation must not fail.
    void reserve(const HeadShape& shape, const AttentionPlan& plan);
};

// Runs one unit. queries: [T, q_stride] float; states: [T, heads, plan.segments, state_floats].
void attend(DType kv, const Batch& batch, const AttentionPlan& plan, const HeadShape& shape, int window, const Cache& cache,
            const float* queries, size_t q_stride, int unit, AttentionScratch& scratch, float* states) noexcept;

// Merges a token's segments and writes its [heads * head_dim] output.
void finish_attention(const HeadShape& shape, int segments, int last_segment, const float* states, float* out) noexcept;

}  // namespace paceline
