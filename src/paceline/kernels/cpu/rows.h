// Operations on one token's float row. `n` is padded to a multiple of 16; padding elements are zero.
#pragma once
#include "simd.h"

namespace paceline {

// out = x / rms(x) * weight, the mean taken over `count` elements.
inline void rms_norm(const float* x, const float* weight, int n, int count, float eps, float* out) {
    v16f squares = {};
    for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)count + eps);
    for (int i = 0; i < n; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
}

inline void add(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 16) store(x + i, load(x + i) + load(y + i));
}

// Half-split rotation of one head; cos and sin hold half = head_dim / 2 values.
inline void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

inline v16f silu(v16f x) { return x / (1.0f + vexp(-x)); }

// x * sigmoid(2 u) equals the tanh form of GELU, u = sqrt(2 / pi) (x + 0.044715 x^3).
inline v16f gelu_tanh(v16f x) {
    const v16f u = x * fma(x * x, splat(0.0356774081f), splat(0.7978845608f));
    return x / (1.0f + vexp(u * -2.0f));
}

}  // namespace paceline
