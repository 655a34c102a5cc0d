#include "attention.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "tile.h"

namespace paceline {

namespace {

int segment_of(int position) { return position / kSegment; }
int first_visible(int position, int window) { return window > 0 ? std::max(0, position + 1 - window) : 0; }

// The running softmax of the queries of one unit.
struct States {
    float* data;
    int width, value_width;
    float* values(int q) const { return data + (size_t)q * width; }
    float& top(int q) const { return values(q)[value_width]; }
    float& total(int q) const { return values(q)[value_width + 1]; }
    void clear(int q) const {
        std::fill(values(q), values(q) + width, 0.0f);
        top(q) = -INFINITY;
    }
};

void merge(float* into, const float* from, int value_width) {
    const float a = into[value_width], b = from[value_width];
    if (b == -INFINITY) return;
    if (a == -INFINITY) {
        std::memcpy(into, from, (value_width + 2) * sizeof(float));
        return;
    }
    const float top = a > b ? a : b;
    const float keep = sexp(a - top), take = sexp(b - top);
    for (int i = 0; i < value_width; i += 16) store(into + i, fma(load(from + i), splat(take), load(into + i) * keep));
    into[value_width] = top;
    into[value_width + 1] = into[value_width + 1] * keep + from[value_width + 1] * take;
}

// Some key-value heads of a group of tokens. Query q of a head is query head q % group of token q / group.
template <class Step> class Unit {
  public:
    Unit(const Batch& batch, const HeadShape& shape, int window, const Cache& cache, const TokenGroup& group, int head,
         int heads, AttentionScratch& scratch)
        : batch_(batch), shape_(shape), window_(window), group_(group), tile_(shape.head_dim, shape.kv_heads, cache, scratch),
          value_width_((int)round_up(shape.head_dim, 16)), words_(shape.head_dim / Step::per), head_(head), heads_(heads),
          count_(group.count * shape.group()), queries_(scratch.queries.data()),
          states_{scratch.states.data(), shape.state_floats(), value_width_} {}

    void load_queries(const float* queries, size_t stride) {
        using Element = typename Step::Element;
        const int g = shape_.group(), width = g * shape_.head_dim;
        for (int h = 0; h < heads_; h++)
            for (int t = 0; t < group_.count; t++) {
                const float* x = queries + (group_.first + t) * stride + (size_t)(head_ + h) * width;
                Element* out = reinterpret_cast<Element*>(queries_ + ((size_t)h * count_ + t * g) * words_);
                for (int i = 0; i < width; i++) out[i] = convert<Element>(x[i]);
            }
    }

    // Runs one segment and stores its result as partial result `slot` of `segments`, or merges it into that.
    void run_segment(int segment, int segments, int slot, bool into_running, float* out) {
        const int begin = segment * kSegment, end = std::min(begin + kSegment, group_.end);
        run_blocks(begin, end, !into_running, false);
        // Zero weight times what another token alone sees is NaN if that is not finite: each token then runs alone.
        if (group_.count > 1 && !finite()) run_blocks(begin, end, false, true);
        const int g = shape_.group();
        for (int h = 0; h < heads_; h++)
            for (int q = 0; q < count_; q++) {
                const size_t query_head = (size_t)(group_.first + q / g) * shape_.heads + (head_ + h) * g + q % g;
                float* target = out + (query_head * segments + slot) * states_.width;
                const float* source = states_.values(h * count_ + q);
                if (into_running) merge(target, source, value_width_);
                else std::copy(source, source + states_.width, target);
            }
    }

  private:
    void run_blocks(int begin, int end, bool touch, bool alone) {
        for (int q = 0; q < heads_ * count_; q++) states_.clear(q);
        for (int block = begin; block < end; block += kBlock) {
            if (touch) tile_.template touch_block<Step>(batch_, group_.first + group_.count - 1, block, head_, heads_);
            run_block(block, alone);
        }
    }

    bool finite() const {
        v16i broken = {};
        for (int q = 0; q < heads_ * count_; q++)
            for (int i = 0; i < value_width_; i += 16) {
                const v16f zero = load(states_.values(q) + i) * 0.0f;
                broken |= zero != zero;
            }
        return !any(broken);
    }

    void run_block(int block, bool alone) {
        if (!alone && (block + kBlock <= group_.shared_end || group_.shared_end == group_.end)) {
            int first = 0, last = group_.count;
            while (first < last && visible_end(first, block, nullptr) == 0) first++;
            while (last > first && visible_end(last - 1, block, nullptr) == 0) last--;
            if (first < last) run_tokens(block, first, last);
            return;
        }
        for (int t = 0; t < group_.count; t++)
            if (visible_end(t, block, nullptr) > 0) run_tokens(block, t, t + 1);
    }

    // Positions of the block a token sees: [*begin, returned end), as offsets; 0 if none.
    int visible_end(int t, int block, int* begin) const {
        const int position = batch_.positions[group_.first + t];
        const int low = std::max(0, first_visible(position, window_) - block);
        const int high = std::min(kBlock, position + 1 - block);
        if (begin) *begin = low;
        return high > low ? high : 0;
    }

    // The last of the tokens must see whatever the others see.
    void run_tokens(int block, int first, int last) {
        const int g = shape_.group(), count = (last - first) * g;
        const int32_t* positions = batch_.positions + group_.first;
        const int low = first_visible(*std::min_element(positions + first, positions + last), window_);
        for (int h = 0; h < heads_; h++) {
            tile_.template load_block<Step>(batch_, group_.first + last - 1, block, low, head_ + h);
            const int q0 = h * count_ + first * g;
            score_block<Step>(tile_, queries_ + (size_t)q0 * words_, words_, count, scores_);
            for (int row = 0; row < count; row++) {
                int begin = 0;
                const int end = visible_end(first + row / g, block, &begin);
                softmax(q0 + row, scores_ + row * kBlock, begin, end, row);
            }
            for (int row = 0; row < count; row += 16) store(keep_ + row, vexp(load(keep_ + row)));
            for (int row = 0; row < count; row++)
                states_.total(q0 + row) = states_.total(q0 + row) * keep_[row] + sums_[row];
            weigh_block<Step>(tile_, weights_, keep_, count, states_.values(q0), states_.width);
        }
    }

    // Moves a query's maximum, and leaves its weights, their sum and the logarithm of what its past keeps.
    void softmax(int q, const float* scores, int low, int high, int row) {
        typename Step::Element* out = weights_ + row * kBlock;
        keep_[row] = sums_[row] = 0.0f;
        if (high == 0) {
            std::memset(out, 0, kBlock * sizeof(*out));
            return;
        }
        v16f s[kBlock / 16];
        for (int i = 0; i < kBlock / 16; i++) {
            const v16i at = lanes() + 16 * i;
            s[i] = select((at >= low) & (at < high), load(scores + 16 * i) * shape_.scale, splat(-INFINITY));
        }
        const float before = states_.top(q), now = std::max(before, max_lane(vmax(s[0], s[1])));
        v16f total = {};
        for (int i = 0; i < kBlock / 16; i++) total += store_weights(vexp(s[i] - now), out + 16 * i);
        keep_[row] = before - now;
        sums_[row] = sum(total);
        states_.top(q) = now;
    }

    const Batch& batch_;
    const HeadShape& shape_;
    const int window_;
    const TokenGroup& group_;
    BlockTile tile_;
    const int value_width_, words_, head_, heads_, count_;
    uint32_t* const queries_;
    const States states_;
    alignas(64) float scores_[kMaxQueries * kBlock];
    alignas(64) typename Step::Element weights_[kMaxQueries * kBlock];
    alignas(64) float keep_[kMaxQueries] = {};
    float sums_[kMaxQueries];
};

void group_tokens(const Batch& batch, int limit, std::vector<TokenGroup>& groups) {
    for (int t = 0; t < batch.tokens_count; t++) {
        const bool chunk = batch.path_len[t] == 0;
        const int end = batch.positions[t] + 1;
        const int shared = chunk ? end : batch.prefix_len[t] / kBlock * kBlock;
        TokenGroup* last = groups.empty() ? nullptr : &groups.back();
        const bool joins = last && last->count < limit && batch.rows[last->first] == batch.rows[t] &&
                           (batch.path_len[last->first] == 0) == chunk &&
                           (!chunk || batch.positions[t] > batch.positions[t - 1]);
        if (!joins) {
            groups.push_back({t, 1, shared, end});
            continue;
        }
        last->count++;
        last->end = std::max(last->end, end);
        last->shared_end = chunk ? last->end : std::min(last->shared_end, shared);
    }
}

template <class Step>
void attend_as(const Batch& batch, const AttentionPlan& plan, const HeadShape& shape, int window, const Cache& cache,
               const float* queries, size_t q_stride, int unit, AttentionScratch& scratch, float* states) {
    const int per_group = plan.head_parts * (plan.split ? plan.segments : 1);
    const TokenGroup& group = plan.groups[plan.groups.size() - 1 - unit / per_group];
    const int heads = shape.kv_heads / plan.head_parts, head = unit % plan.head_parts * heads;
    const int from = segment_of(first_visible(batch.positions[group.first], window));
    const int to = segment_of(group.end - 1);
    const int own = unit % per_group / plan.head_parts;
    if (plan.split && own > to) return;
    Unit<Step> work(batch, shape, window, cache, group, head, heads, scratch);
    work.load_queries(queries, q_stride);
    if (plan.split) {
        work.run_segment(own, plan.segments, own, false, states);
        return;
    }
    for (int segment = from; segment <= to; segment++) work.run_segment(segment, 1, 0, segment > from, states);
}

}  // namespace

AttentionPlan plan_attention(const Batch& batch, const HeadShape& shape, int threads) {
    AttentionPlan plan;
    const int tokens = batch.tokens_count;
    const int longest = tokens ? *std::max_element(batch.positions, batch.positions + tokens) + 1 : 1;
    const int segments = segment_of(longest - 1) + 1;
    plan.split = segments > 1 && tokens <= 32;
    plan.segments = plan.split ? segments : 1;
    const int fit = std::max(1, kMaxQueries / shape.group());
    const int wanted = std::max(2, tokens * shape.kv_heads * plan.segments / (4 * threads));
    group_tokens(batch, std::min(fit, wanted), plan.groups);
    // A unit with few queries waits for memory and had better read it in order.
    const int groups = (int)plan.groups.size();
    const bool whole = tokens <= 4 * groups && groups * plan.segments >= threads;
    plan.head_parts = whole ? 1 : shape.kv_heads;
    return plan;
}

void AttentionScratch::reserve(const HeadShape& shape, const AttentionPlan& plan) {
    int tokens = 0;
    for (const TokenGroup& group : plan.groups) tokens = std::max(tokens, group.count);
    const size_t rows = (size_t)tokens * shape.heads / plan.head_parts, width = round_up(shape.head_dim, 16);
    grow(keys, width * kBlock);
    grow(values, width * kBlock);
    grow(queries, rows * shape.head_dim);
    grow(states, rows * shape.state_floats());
}

void attend(DType kv, const Batch& batch, const AttentionPlan& plan, const HeadShape& shape, int window, const Cache& cache,
            const float* queries, size_t q_stride, int unit, AttentionScratch& scratch, float* states) noexcept {
    if (kv == DType::f32) attend_as<F32Step>(batch, plan, shape, window, cache, queries, q_stride, unit, scratch, states);
    else attend_as<Bf16Step>(batch, plan, shape, window, cache, queries, q_stride, unit, scratch, states);
}

void finish_attention(const HeadShape& shape, int segments, int last_segment, const float* states, float* out) noexcept {
    const int width = (int)round_up(shape.head_dim, 16), floats = shape.state_floats();
    alignas(64) float merged[1024];
    for (int h = 0; h < shape.heads; h++) {
        std::fill(merged, merged + floats, 0.0f);
        merged[width] = -INFINITY;
        const float* state = states + (size_t)h * segments * floats;
        for (int s = 0; s <= last_segment; s++) merge(merged, state + (size_t)s * floats, width);
        // A block adds zeros of either sign for the lanes it masks: adding zero leaves only +0.
        const float inverse = 1.0f / merged[width + 1];
        for (int i = 0; i < shape.head_dim; i++) out[h * shape.head_dim + i] = merged[i] * inverse + 0.0f;
    }
}

}  // namespace paceline
