// Packing of matrices at load time, the way back for embedding rows, and rounding of activation rows.
#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "simd.h"

namespace paceline {

namespace {

float element(const Source& s, int row, int i) {
    if (!s.rows[row]) return 0.0f;
    if (s.dtype == DType::f32) return load_as<float>(s.rows[row] + 4 * (size_t)i);
    return from_bf16(load_as<uint16_t>(s.rows[row] + 2 * (size_t)i));
}

// The 32 rows of a panel as floats, zero beyond k: [32][count].
void read_slab(const Source& s, int first, int count, int k, float* slab) {
    const int valid = std::max(0, std::min(count, k - first));
    for (int r = 0; r < kPanel; r++) {
        float* out = slab + r * count;
        if (s.rows[r] && s.dtype == DType::f32) {
            std::memcpy(out, s.rows[r] + 4 * (size_t)first, valid * sizeof(float));
        } else {
            for (int i = 0; i < valid; i++) out[i] = element(s, r, first + i);
        }
        std::fill(out + valid, out + count, 0.0f);
    }
}

void pack_f32(const float* slab, int count, uint8_t* out) {
    for (int i = 0; i < count; i++)
        for (int r = 0; r < kPanel; r++) store_as(out + (i * kPanel + r) * 4, slab[r * count + i]);
}

void pack_bf16(const float* slab, int count, uint8_t* out) {
    for (int i = 0; i < count; i += 2)
        for (int r = 0; r < kPanel; r++) {
            const uint32_t pair = to_bf16(slab[r * count + i]) | (uint32_t)to_bf16(slab[r * count + i + 1]) << 16;
            store_as(out + (i / 2 * kPanel + r) * 4, pair);
        }
}

// The scale is rounded up to bf16 before the weights are divided by it, so its rounding costs no accuracy.
void pack_int8(const float* slab, uint8_t* out) {
    for (int r = 0; r < kPanel; r++) {
        const float* w = slab + r * kGroup;
        float peak = 0.0f;
        for (int i = 0; i < kGroup; i++) peak = std::max(peak, std::fabs(w[i]));
        uint16_t scale = to_bf16(peak / 127.0f);
        if (from_bf16(scale) * 127.0f < peak) scale++;
        const float inverse = from_bf16(scale) > 0.0f ? 1.0f / from_bf16(scale) : 0.0f;
        for (int i = 0; i < kGroup; i++) {
            const float q = std::min(127.0f, std::max(-127.0f, w[i] * inverse));
            const int rounded = (int)(q + (q < 0.0f ? -0.5f : 0.5f));
            out[(i / 4 * kPanel + r) * 4 + i % 4] = (uint8_t)(rounded + 128);
        }
        store_as(out + kGroup * kPanel + r * 2, scale);
    }
}

void prepare_int8(const float* x, int k, uint8_t* out) {
    for (int first = 0; first < k; first += kGroup, out += sizeof(ActGroup)) {
        ActGroup* group = reinterpret_cast<ActGroup*>(out);
        v16f peak = {};
        for (int i = 0; i < kGroup; i += 16) {
            const v16f v = load(x + first + i);
            peak = vmax(peak, vmax(v, -v));
        }
        const float top = max_lane(peak);
        // 32639 = 127 * 256 + 127, the largest value two signed bytes can hold.
        const v16f inverse = splat(top > 0.0f ? 32639.0f / top : 0.0f);
        const v16f magic = splat(12582912.0f);
        v16i total = {};
        for (int i = 0; i < kGroup; i += 16) {
            const v16f t = load(x + first + i) * inverse + magic;
            const v16i q = bits<v16i>(t) - bits<v16i>(magic);
            const v16i high = (q + 128) >> 8, low = q - (high << 8);
            store_as(group->high + i, __builtin_convertvector(high, v16b));
            store_as(group->low + i, __builtin_convertvector(low, v16b));
            total += q;
        }
        group->scale = top / 32639.0f;
        group->start = -128 * sum(total);
    }
}

}  // namespace

void prepare_row(DType dtype, const float* x, int k, uint8_t* out) {
    if (dtype == DType::f32) {
        std::memcpy(out, x, (size_t)k * sizeof(float));
    } else if (dtype == DType::bf16) {
        for (int i = 0; i < k; i += 16) store_as(out + i * 2, to_bf16(load(x + i)));
    } else {
        prepare_int8(x, k, out);
    }
}

void pack_panel(const Matrix& m, int panel, const Source& source) {
    float slab[kPanel * kGroup];
    uint8_t* out = m.data + panel * m.panel_bytes();
    const int padded = m.dtype == DType::f32 ? m.k : (int)round_up(m.k, m.dtype == DType::bf16 ? 2 : kGroup);
    for (int first = 0; first < padded; first += kGroup) {
        const int count = std::min(kGroup, padded - first);
        read_slab(source, first, count, m.k, slab);
        if (m.dtype == DType::f32) {
            pack_f32(slab, count, out + (size_t)first * kPanel * 4);
        } else if (m.dtype == DType::bf16) {
            pack_bf16(slab, count, out + (size_t)first * kPanel * 2);
        } else {
            pack_int8(slab, out + first / kGroup * kGroupBytes);
        }
    }
}

void unpack_row(const Matrix& m, int row, float* out) {
    const uint8_t* panel = m.panel(row / kPanel);
    const int r = row % kPanel;
    if (m.dtype == DType::f32) {
        for (int i = 0; i < m.k; i++) out[i] = load_as<float>(panel + ((size_t)i * kPanel + r) * 4);
    } else if (m.dtype == DType::bf16) {
        for (int i = 0; i < m.k; i++) out[i] = from_bf16(load_as<uint16_t>(panel + ((size_t)i / 2 * kPanel + r) * 4 + i % 2 * 2));
    } else {
        for (int i = 0; i < m.k; i++) {
            const uint8_t* group = panel + i / kGroup * kGroupBytes;
            const float scale = from_bf16(load_as<uint16_t>(group + kGroup * kPanel + r * 2));
            out[i] = (float)(group[(i % kGroup / 4 * kPanel + r) * 4 + i % 4] - 128) * scale;
        }
    }
}

}  // namespace paceline
