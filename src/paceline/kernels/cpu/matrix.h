// Packed matrices and prepared activations.
//
// A matrix [n, k] is a sequence of panels of 32 outputs, each one contiguous run of memory. Lanes are outputs:
//   f32   [k]      [2 blocks][16 outputs]         float
//   bf16  [k / 2]  [2 blocks][16 outputs][2 of k] bf16
//   int8  [k / 64] { [16][2 blocks][16 outputs][4 of k] uint8 = w + 128; [2][16] bf16 scale }
// so that an output is one chain of multiply-adds along k, whatever the number of rows that share the pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

enum class DType : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

constexpr int kPanel = 32;
constexpr int kGroup = 64;
constexpr size_t kGroupBytes = kGroup * kPanel + kPanel * 2;

inline size_t round_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

struct Matrix {
    DType dtype = DType::f32;
    int n = 0;
    int k = 0;
    uint8_t* data = nullptr;

    int panels() const { return (n + kPanel - 1) / kPanel; }
    // Dwords of an activation row along k (int8: groups of 64).
    int steps() const { return dtype == DType::f32 ? k : dtype == DType::bf16 ? (k + 1) / 2 : (k + kGroup - 1) / kGroup; }
    size_t panel_bytes() const { return steps() * (dtype == DType::int8 ? kGroupBytes : size_t{128}); }
    size_t bytes() const { return panels() * panel_bytes(); }
    const uint8_t* panel(int p) const { return data + p * panel_bytes(); }
};

// One group of an int8 model's activations in 16-bit fixed point: x = (256 high + low) * scale.
struct ActGroup {
    int8_t high[kGroup];
    int8_t low[kGroup];
    float scale;
    int32_t start;  // -128 * sum of the fixed-point values: undoes the +128 of the weights
};

inline size_t act_row_bytes(DType dtype, int k) {
    if (dtype == DType::f32) return round_up(k, 16) * 4;
    if (dtype == DType::bf16) return round_up(k, 32) * 2;
    return round_up(k, kGroup) / kGroup * sizeof(ActGroup);
}

// Rounds one float row (zero-padded to a multiple of 64) to what products of `dtype` read.
void prepare_row(DType dtype, const float* x, int k, uint8_t* out);

// Row sources of a packed matrix: `rows[i]` is the k elements of output i, null for padding.
struct Source {
    const uint8_t* const* rows;
    DType dtype;
};
void pack_panel(const Matrix& m, int panel, const Source& source);
void unpack_row(const Matrix& m, int row, float* out);

// Weights to bring into the second-level cache while a tile is computed: `lines` cache lines for 128 bytes read.
struct Ahead {
    const uint8_t* from;
    int lines;
};

// out[i][0..32) = rows of `acts` times one panel, for up to kMaxTile rows.
constexpr int kMaxTile = 12;
constexpr size_t kDistance = 12 << 10;
using TileFn = void (*)(const uint8_t* panel, const uint8_t* acts, size_t act_bytes, int steps, float* out, Ahead ahead);
TileFn tile_function(DType dtype, int rows);

// Calls claim(first_row, rows) before and sink(first_row, rows, tile) after each tile of rows of one panel, rows
// split as evenly as tiles allow. One
// row keeps memory busy by itself. With several the products take longer: one tile asks for what it will read in a
// while; of more tiles the first two ask for the next panel, half each.
template <class Claim, class Sink>
void panel_product(const Matrix& m, int p, const uint8_t* acts, int rows, Claim&& claim, Sink&& sink) {
    alignas(64) float tile[kMaxTile * kPanel];
    const size_t act_bytes = act_row_bytes(m.dtype, m.k);
    const int tiles = (rows + kMaxTile - 1) / kMaxTile;
    for (int t = 0, row = 0; t < tiles; t++) {
        const int count = (rows - row + tiles - t - 1) / (tiles - t);
        Ahead ahead{nullptr, 0};
        if (tiles > 1 && t < 2) ahead = {m.panel(p + 1) + t * m.panel_bytes() / 2, 1};
        else if (tiles == 1 && count > 4) ahead = {m.panel(p) + kDistance, 2};
        claim(row, count);
        tile_function(m.dtype, count)(m.panel(p), acts + row * act_bytes, act_bytes, m.steps(), tile, ahead);
        sink(row, count, tile);
        row += count;
    }
}

}  // namespace paceline
