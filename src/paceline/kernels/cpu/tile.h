// One block of cached keys and values of one head, rearranged so that lanes are positions for the scores and
// channels for the weighted sum.
#pragma once
#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace paceline {

template <class Element> inline Element convert(float x);
template <> inline float convert<float>(float x) { return x; }
template <> inline uint16_t convert<uint16_t>(float x) { return to_bf16(x); }

// Stores softmax weights as the products will read them and returns the values stored.
inline v16f store_weights(v16f p, float* out) {
    store(out, p);
    return p;
}
inline v16f store_weights(v16f p, uint16_t* out) {
    const v16h h = to_bf16(p);
    store_as(out, h);
    return from_bf16(h);
}

// In-register transpose of 16 x 16 dwords.
inline void transpose(v16u* r) {
    v16u t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = PACELINE_SHUFFLE(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        t[i + 1] = PACELINE_SHUFFLE(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = i; j < i + 2; j++) {
            const int to = 2 * j - i;
            r[to] = PACELINE_SHUFFLE(t[j], t[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            r[to + 1] = PACELINE_SHUFFLE(t[j], t[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = i; j < i + 4; j++) {
            t[j] = PACELINE_SHUFFLE(r[j], r[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            t[j + 4] = PACELINE_SHUFFLE(r[j], r[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = PACELINE_SHUFFLE(t[j], t[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        r[j + 8] = PACELINE_SHUFFLE(t[j], t[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

class BlockTile {
  public:
    BlockTile(int head_dim, int kv_heads, const Cache& cache, AttentionScratch& scratch)
        : head_dim_(head_dim), value_width_((int)round_up(head_dim, 16)), kv_heads_(kv_heads), cache_(cache),
          keys_(scratch.keys.data()), values_(scratch.values.data()) {}

    // Loads what `token` sees of a block of one head, from position `low` on. Lanes outside repeat the nearest slot
    // inside; their weight is zero.
    template <class Step> void load_block(const Batch& batch, int token, int block, int low, int head) {
        using Element = typename Step::Element;
        const int last = batch.positions[token];
        filled_ = std::min(kBlock, (int)round_up(last + 1 - block, 2));
        const Element *k[kBlock], *v[kBlock];
        for (int i = 0; i < kBlock; i++) {
            const size_t at = offset<Element>(batch.slot_of(token, std::max(low, std::min(block + i, last))), head);
            k[i] = reinterpret_cast<const Element*>(cache_.keys + at);
            v[i] = reinterpret_cast<const Element*>(cache_.values + at);
        }
        for (int i = 0; i < filled_; i += 16) load_keys<Step>(k + i, keys_ + i);
        load_values(v);
    }

    // Reads a block of some heads in the order of memory, which hardware prefetching follows; the transposing loads
    // of load_block alone run at a quarter of that speed. (Prefetch instructions do not help: too few may be under
    // way at once.)
    template <class Step> void touch_block(const Batch& batch, int token, int block, int head, int heads) const {
        const int end = std::min(block + kBlock, batch.positions[token] + 1);
        const size_t bytes = heads * head_dim_ * sizeof(typename Step::Element);
        for (const uint8_t* base : {cache_.keys, cache_.values})
            for (int position = block; position < end; position++) {
                const uint8_t* slot = base + offset<typename Step::Element>(batch.slot_of(token, position), head);
                touch(slot, bytes);
            }
    }

    const uint32_t* keys() const { return keys_; }      // [head_dim / per][kBlock]
    const uint32_t* values() const { return values_; }  // [kBlock / per][value_width]
    int value_width() const { return value_width_; }
    int filled() const { return filled_; }  // an even number of lanes from the first

  private:
    template <class Element> size_t offset(size_t slot, int head) const {
        return (slot * kv_heads_ + head) * head_dim_ * sizeof(Element);
    }

    template <class Step> void load_keys(const typename Step::Element* const* rows, uint32_t* out) {
        const int words = head_dim_ / Step::per;
        for (int first = 0; first < words; first += 16) {
            const int count = std::min(16, words - first);
            v16u r[16] = {};
            for (int i = 0; i < 16; i++) {
                const auto* from = rows[i] + first * Step::per;
                if (count == 16) r[i] = load_as<v16u>(from);
                else std::memcpy(&r[i], from, count * 4);
            }
            transpose(r);
            for (int i = 0; i < count; i++) store_as(out + (size_t)(first + i) * kBlock, r[i]);
        }
    }

    void load_values(const float* const* rows) {
        for (int j = 0; j < filled_; j++) std::memcpy(&values_[(size_t)j * value_width_], rows[j], head_dim_ * sizeof(float));
    }

    void load_values(const uint16_t* const* rows) {
        for (int j = 0; j < filled_; j += 2) {
            uint32_t* out = &values_[(size_t)j / 2 * value_width_];
            for (int d = 0; d < head_dim_; d += 16) {
                v16h a = {}, b = {};
                const int count = std::min(16, head_dim_ - d);
                if (count == 16) {
                    a = load_as<v16h>(rows[j] + d);
                    b = load_as<v16h>(rows[j + 1] + d);
                } else {
                    std::memcpy(&a, rows[j] + d, count * 2);
                    std::memcpy(&b, rows[j + 1] + d, count * 2);
                }
                store_as(out + d, __builtin_convertvector(a, v16u) | __builtin_convertvector(b, v16u) << 16);
            }
        }
    }

    const int head_dim_, value_width_, kv_heads_;
    const Cache cache_;
    uint32_t *const keys_, *const values_;
    int filled_ = 0;
};

template <class Step, int Rows, int Wide>
void score_wide(const uint32_t* keys, const uint32_t* queries, int words, float* scores) {
    v16f acc[Rows][Wide] = {};
    for (int w = 0; w < words; w++) {
        v16u k[Wide];
        for (int c = 0; c < Wide; c++) k[c] = load_as<v16u>(keys + (size_t)w * kBlock + 16 * c);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; r++)
            for (int c = 0; c < Wide; c++) acc[r][c] = Step::step(acc[r][c], k[c], queries[(size_t)r * words + w]);
    }
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Wide; c++) store(scores + r * kBlock + 16 * c, acc[r][c]);
}

template <class Step, int Rows>
void score_rows(const BlockTile& tile, const uint32_t* queries, int words, float* scores) {
    if (tile.filled() > 16) score_wide<Step, Rows, 2>(tile.keys(), queries, words, scores);
    else score_wide<Step, Rows, 1>(tile.keys(), queries, words, scores);
}

// scores: [count, kBlock], of the filled lanes
template <class Step>
void score_block(const BlockTile& tile, const uint32_t* queries, int words, int count, float* scores) {
    for (int q = 0; q < count;) {
        const uint32_t* x = queries + (size_t)q * words;
        float* out = scores + q * kBlock;
        const int rows = std::min(6, count - q);
        switch (rows) {
            case 1: score_rows<Step, 1>(tile, x, words, out); break;
            case 2: score_rows<Step, 2>(tile, x, words, out); break;
            case 3: score_rows<Step, 3>(tile, x, words, out); break;
            case 4: score_rows<Step, 4>(tile, x, words, out); break;
            case 5: score_rows<Step, 5>(tile, x, words, out); break;
            default: score_rows<Step, 6>(tile, x, words, out);
        }
        q += rows;
    }
}

template <class Step, int Rows, int Wide>
void weigh_rows(const uint32_t* values, int value_width, int filled, const typename Step::Element* weights, const float* keep, float* out,
                int stride) {
    v16f acc[Rows][Wide];
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Wide; c++) acc[r][c] = load(out + r * stride + 16 * c) * keep[r];
    for (int j = 0; j < filled / Step::per; j++) {
        v16u v[Wide];
        for (int c = 0; c < Wide; c++) v[c] = load_as<v16u>(values + (size_t)j * value_width + 16 * c);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; r++) {
            const uint32_t p = dword(weights + r * kBlock + j * Step::per);
#pragma GCC unroll 4
            for (int c = 0; c < Wide; c++) acc[r][c] = Step::step(acc[r][c], v[c], p);
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Wide; c++) store(out + r * stride + 16 * c, acc[r][c]);
}

template <class Step, int Rows>
void weigh_wide(const BlockTile& tile, const typename Step::Element* weights, const float* keep, float* out, int stride) {
    const int width = tile.value_width();
    int c = 0;
    for (; c + 64 <= width; c += 64) weigh_rows<Step, Rows, 4>(tile.values() + c, width, tile.filled(), weights, keep, out + c, stride);
    for (; c < width; c += 16) weigh_rows<Step, Rows, 1>(tile.values() + c, width, tile.filled(), weights, keep, out + c, stride);
}

// out[q] = out[q] * keep[q] + weights[q] . values, rows of out `stride` floats apart.
template <class Step>
void weigh_block(const BlockTile& tile, const typename Step::Element* weights, const float* keep, int count, float* out,
                 int stride) {
    for (int q = 0; q < count;) {
        const auto* p = weights + q * kBlock;
        float* o = out + (size_t)q * stride;
        const int rows = std::min(4, count - q);
        switch (rows) {
            case 1: weigh_wide<Step, 1>(tile, p, keep + q, o, stride); break;
            case 2: weigh_wide<Step, 2>(tile, p, keep + q, o, stride); break;
            case 3: weigh_wide<Step, 3>(tile, p, keep + q, o, stride); break;
            default: weigh_wide<Step, 4>(tile, p, keep + q, o, stride);
        }
        q += rows;
    }
}

}  // namespace paceline
