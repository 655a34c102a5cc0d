// The Gumbel noise of paceline/core/noise.py, bit for bit: no fused multiply-adds (build.py turns contraction off).
#pragma once
#include "simd.h"

namespace paceline {

struct NoiseKeys {
    uint32_t first, second;
};

inline uint64_t mix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

inline NoiseKeys noise_keys(uint64_t seed, int64_t position) {
    const uint64_t mixed = mix64(mix64(seed) + (uint64_t)position);
    return {(uint32_t)mixed, (uint32_t)(mixed >> 32)};
}

inline v16u mix32(v16u x) {
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0xD35A2D97u;
    return x ^ (x >> 15);
}

inline v16f plain_log(v16f x) {
    const v16i shifted = bits<v16i>(x) - 0x3F3504F3;
    const v16f exponent = __builtin_convertvector(shifted >> 23, v16f);
    const v16f f = bits<v16f>((shifted & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    const v16f z = f * f;
    v16f y = splat(7.0376836292e-2f);
    y = y * f + -1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f + -1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f + -1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f + -2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = (y * f) * z;
    y = y + exponent * -2.12194440e-4f;
    y = y + z * -0.5f;
    return (f + y) + exponent * 0.693359375f;
}

// No noise is larger: the smallest uniform is 2^-32.
constexpr float kMostNoise = 22.2f;

inline v16f uniform(NoiseKeys keys, v16u ids) {
    const v16u hash = mix32(mix32(ids + keys.first) ^ keys.second);
    const v16f v = (__builtin_convertvector(bits<v16i>(hash >> 1), v16f) + 0.5f) * 4.656612873077393e-10f;
    return vmin(v, splat(0.99999994039535522f));
}

// Falls as v rises, and is below -log(v).
inline v16f gumbel_of(v16f v) {
    const v16f x = 1.0f - v;
    return -plain_log(-(plain_log(x) + ((1.0f - x) - v)));
}

inline v16f gumbel(NoiseKeys keys, v16u ids) { return gumbel_of(uniform(keys, ids)); }

}  // namespace paceline
