// Tile products: `Rows` activation rows times one panel of 32 outputs.
#include <array>
#include <utility>

#include "matrix.h"
#include "simd.h"

namespace paceline {

namespace {

inline void ask(Ahead& ahead) {
    if (ahead.lines > 0) __builtin_prefetch(ahead.from, 0, 2);
    if (ahead.lines > 1) __builtin_prefetch(ahead.from + 64, 0, 2);
    ahead.from += ahead.lines * 64;
}

template <class Step, int Rows>
void dot_tile(const uint8_t* w, const uint8_t* acts, size_t act_bytes, int steps, float* out, Ahead ahead) {
    v16f acc[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) acc[r][0] = acc[r][1] = v16f{};
    for (int s = 0; s < steps; s++, w += 128) {
        const v16u w0 = load_as<v16u>(w), w1 = load_as<v16u>(w + 64);
        if (Rows > 4) ask(ahead);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            const uint32_t x = dword(acts + r * act_bytes + s * 4);
            acc[r][0] = Step::step(acc[r][0], w0, x);
            acc[r][1] = Step::step(acc[r][1], w1, x);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) {
        store(out + r * kPanel, acc[r][0]);
        store(out + r * kPanel + 16, acc[r][1]);
    }
}

inline v16i dot4(v16i acc, v16u w, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (v16i)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)x));
#else
    for (int shift = 0; shift < 32; shift += 8) acc += bits<v16i>((w >> shift) & 255u) * (int32_t)(int8_t)(x >> shift);
    return acc;
#endif
}

// What a group of 64 adds: the integer sums are exact, so only the float sum over groups has an order.
template <int Rows> void add_group(v16f (&acc)[Rows][2], const v16i (&part)[Rows][2], const ActGroup* const* x, const uint8_t* scales) {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++)
        for (int b = 0; b < 2; b++) {
            const v16f scale = from_bf16(load_as<v16h>(scales + b * 32)) * x[r]->scale;
            acc[r][b] = fma(__builtin_convertvector(part[r][b], v16f), scale, acc[r][b]);
        }
}

// Few rows: both halves of the activations at once, so that the weights are read once.
template <int Rows> inline void narrow_group(v16i (&part)[Rows][2], const uint8_t* w, const ActGroup* const* x) {
    v16i high[Rows][2] = {}, low[Rows][2];
    for (int r = 0; r < Rows; r++) low[r][0] = low[r][1] = splat_i(x[r]->start);
#pragma GCC unroll 4
    for (int s = 0; s < 16; s++) {
        const v16u w0 = load_as<v16u>(w + s * 128), w1 = load_as<v16u>(w + s * 128 + 64);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; r++) {
            high[r][0] = dot4(high[r][0], w0, dword(x[r]->high + 4 * s));
            high[r][1] = dot4(high[r][1], w1, dword(x[r]->high + 4 * s));
            low[r][0] = dot4(low[r][0], w0, dword(x[r]->low + 4 * s));
            low[r][1] = dot4(low[r][1], w1, dword(x[r]->low + 4 * s));
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int b = 0; b < 2; b++) part[r][b] = (high[r][b] << 8) + low[r][b];
}

// Many rows: one accumulator each, the high half first, so that they fit the registers.
template <int Rows>
inline void wide_group(v16i (&part)[Rows][2], const uint8_t* w, const ActGroup* const* x, Ahead& ahead) {
    for (int s = 0; s < 16; s++) {
        ask(ahead);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            part[r][0] = dot4(part[r][0], load_as<v16u>(w + s * 128), dword(x[r]->high + 4 * s));
            part[r][1] = dot4(part[r][1], load_as<v16u>(w + s * 128 + 64), dword(x[r]->high + 4 * s));
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++)
        for (int b = 0; b < 2; b++) part[r][b] = (part[r][b] << 8) + x[r]->start;
    for (int s = 0; s < 16; s++) {
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            part[r][0] = dot4(part[r][0], load_as<v16u>(w + s * 128), dword(x[r]->low + 4 * s));
            part[r][1] = dot4(part[r][1], load_as<v16u>(w + s * 128 + 64), dword(x[r]->low + 4 * s));
        }
    }
}

template <int Rows>
void int8_tile(const uint8_t* w, const uint8_t* acts, size_t act_bytes, int groups, float* out, Ahead ahead) {
    v16f acc[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) acc[r][0] = acc[r][1] = v16f{};
    const ActGroup* x[Rows];
    for (int r = 0; r < Rows; r++) x[r] = reinterpret_cast<const ActGroup*>(acts + r * act_bytes);
    for (int g = 0; g < groups; g++, w += kGroupBytes) {
        v16i part[Rows][2] = {};
        if constexpr (Rows <= 4) narrow_group<Rows>(part, w, x);
        else wide_group<Rows>(part, w, x, ahead);
        add_group<Rows>(acc, part, x, w + kGroup * kPanel);
        for (int r = 0; r < Rows; r++) x[r]++;
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) {
        store(out + r * kPanel, acc[r][0]);
        store(out + r * kPanel + 16, acc[r][1]);
    }
}

using Row = std::array<TileFn, kMaxTile>;

template <int... I> constexpr std::array<Row, 3> make_table(std::integer_sequence<int, I...>) {
    return {Row{dot_tile<F32Step, I + 1>...}, Row{dot_tile<Bf16Step, I + 1>...}, Row{int8_tile<I + 1>...}};
}

constexpr std::array<Row, 3> kTiles = make_table(std::make_integer_sequence<int, kMaxTile>{});

}  // namespace

TileFn tile_function(DType dtype, int rows) { return kTiles[(int)dtype][rows - 1]; }

}  // namespace paceline
