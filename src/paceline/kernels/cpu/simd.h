// Sixteen-lane vectors in GCC/Clang vector extensions. Every reduction has one fixed order, and contraction is
// off (build.py), so a value never depends on which loop or how many tokens it was computed with.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace paceline {

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef int8_t v16b __attribute__((vector_size(16)));

// The lanes of a (0..15) and b (16..31) in the order given.
#if defined(__clang__)
#define PACELINE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PACELINE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, v16i{__VA_ARGS__})
#endif

inline v16f splat(float x) { return x - v16f{}; }
inline v16i splat_i(int32_t x) { return x - v16i{}; }
template <class V> inline V load_as(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline v16f load(const float* p) { return load_as<v16f>(p); }
inline void store(float* p, v16f v) { store_as(p, v); }
inline uint32_t dword(const void* p) { return load_as<uint32_t>(p); }
template <class To, class From> inline To bits(From x) { To y; static_assert(sizeof x == sizeof y, ""); std::memcpy(&y, &x, sizeof y); return y; }

inline v16f fma(v16f a, v16f b, v16f c) {
#if defined(__AVX512F__)
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    v16f r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

inline v16f select(v16i mask, v16f a, v16f b) { return bits<v16f>((mask & bits<v16i>(a)) | (~mask & bits<v16i>(b))); }
inline v16f vmax(v16f a, v16f b) { return a > b ? a : b; }
inline v16f vmin(v16f a, v16f b) { return a < b ? a : b; }
inline bool any(v16i mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    for (int i = 0; i < 16; i++)
        if (mask[i]) return true;
    return false;
#endif
}
inline v16i lanes() { return v16i{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <class V, class Fold> inline auto fold(V v, Fold f) -> decltype(v[0] + v[0]) {
    v = f(v, PACELINE_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = f(v, PACELINE_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = f(v, PACELINE_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = f(v, PACELINE_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}
inline float sum(v16f v) { return fold(v, [](v16f a, v16f b) { return a + b; }); }
inline int32_t sum(v16i v) { return fold(v, [](v16i a, v16i b) { return a + b; }); }
inline float max_lane(v16f v) { return fold(v, [](v16f a, v16f b) { return vmax(a, b); }); }

// Round to nearest even; NaN stays NaN.
inline v16h to_bf16(v16f x) {
#if defined(__AVX512BF16__)
    return (v16h)_mm512_cvtneps_pbh((__m512)x);
#else
    v16u u = bits<v16u>(x);
    v16u r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    v16u nan = (u >> 16) | 0x40u;
    r = (u & 0x7fffffffu) > 0x7f800000u ? nan : r;
    return __builtin_convertvector(r, v16h);
#endif
}
inline v16f from_bf16(v16h h) { return bits<v16f>(__builtin_convertvector(h, v16u) << 16); }
inline uint16_t to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
inline float from_bf16(uint16_t h) { return bits<float>((uint32_t)h << 16); }

// e^x to about 2 ulp; exactly 1 at 0 and exactly 0 below -87. Polynomial: Cephes expf.
inline v16f vexp(v16f x) {
    const v16f magic = splat(12582912.0f);
    v16f y = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
    v16f t = fma(y, splat(1.44269504088896341f), magic);
    v16f n = t - magic;
    v16f r = fma(n, splat(-0.693359375f), y);
    r = fma(n, splat(2.12194440e-4f), r);
    v16f p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    v16f e = bits<v16f>(bits<v16i>(p) + ((bits<v16i>(t) - bits<v16i>(magic)) << 23));
    e = x < splat(-87.0f) ? v16f{} : e;
    return x == x ? e : x;
}
inline float sexp(float x) { return vexp(splat(x))[0]; }

// One step of a dot product on a dword per lane: one float, or two bf16.
struct F32Step {
    static constexpr int per = 1;
    using Element = float;
    static v16f step(v16f acc, v16u w, uint32_t x) { return fma(bits<v16f>(w), splat(bits<float>(x)), acc); }
};
struct Bf16Step {
    static constexpr int per = 2;
    using Element = uint16_t;
    static v16f step(v16f acc, v16u w, uint32_t x) {
#if defined(__AVX512BF16__)
        return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
        v16f low = fma(bits<v16f>(w << 16), splat(bits<float>(x << 16)), acc);
        return fma(bits<v16f>(w & 0xffff0000u), splat(bits<float>(x & 0xffff0000u)), low);
#endif
    }
};

// Starts the transfer of lines another core has just written, all at once rather than one by one as they are used.
inline void touch(const void* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) asm volatile("" : : "r"(static_cast<const uint8_t*>(p)[i]));
}

// Takes ownership of lines about to be written: stores retire in order, so each would wait for its own transfer.
inline void claim(void* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<uint8_t*>(p) + i, 1);
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace paceline
