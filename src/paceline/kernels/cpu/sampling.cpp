// The sampling rule on raw logits.
#include "sampling.h"

#include <algorithm>
#include <cmath>

#include "noise.h"

namespace paceline {

namespace {

inline v16f load_scores(const float* row, int first, int vocab) {
    if (first + 16 <= vocab) return load(row + first);
    v16f v = splat(-INFINITY);
    for (int i = 0; first + i < vocab; i++) v[i] = row[first + i];
    return v;
}

// Largest logit of a row; NaN if any is NaN.
float row_max(const float* row, int vocab) {
    v16f top = splat(-INFINITY);
    v16i broken = {};
    for (int i = 0; i < vocab; i += 16) {
        const v16f x = load_scores(row, i, vocab);
        broken |= x != x;
        top = vmax(top, x);
    }
    return any(broken) ? NAN : max_lane(top);
}

int first_equal(const float* row, int vocab, float value) {
    for (int i = 0; i < vocab; i += 16) {
        const v16i same = load_scores(row, i, vocab) == splat(value);
        if (!any(same)) continue;
        for (int lane = 0; lane < 16; lane++)
            if (same[lane]) return i + lane;
    }
    return 0;
}

int noisy_argmax(const float* row, int vocab, float temperature, NoiseKeys keys, float top) {
    // What lies further below the best than noise can span can neither win nor tie.
    const v16f hopeless = splat(top / temperature - kNoiseSpan);
    v16f best = splat(-INFINITY);
    v16i best_at = {};
    for (int i = 0; i < vocab; i += 16) {
        const v16f scaled = load_scores(row, i, vocab) / temperature;
        if (!any(scaled >= hopeless)) continue;
        const v16i at = lanes() + i;
        const v16f score = scaled + gumbel(keys, bits<v16u>(at));
        const v16i better = score > best;
        best = select(better, score, best);
        best_at = (better & at) | (~better & best_at);
    }
    int winner = 0;
    for (int lane = 1; lane < 16; lane++) {
        const bool tie = best[lane] == best[winner] && best_at[lane] < best_at[winner];
        if (best[lane] > best[winner] || tie) winner = lane;
    }
    return best_at[winner];
}

void choose(const SamplingRows& rows, int r) {
    const float* row = rows.logits + r * rows.stride;
    const float top = row_max(row, rows.vocab);
    rows.finite[r] = std::isfinite(top);
    rows.tokens[r] = 0;
    if (!rows.finite[r]) return;
    const float t = rows.temperatures[r];
    rows.tokens[r] = t == 0.0f ? first_equal(row, rows.vocab, top)
                               : noisy_argmax(row, rows.vocab, t, noise_keys(rows.seeds[r], rows.positions[r]), top);
}

}  // namespace

void coupled_argmax(const SamplingRows& rows) noexcept {
    for (int r = 0; r < rows.count; r++) choose(rows, r);
}

void noise_row(uint64_t seed, int64_t position, int count, float* out) noexcept {
    const NoiseKeys keys = noise_keys(seed, position);
    for (int i = 0; i < count; i += 16) {
        const v16f g = gumbel(keys, bits<v16u>(lanes() + i));
        std::memcpy(out + i, &g, std::min(16, count - i) * sizeof(float));
    }
}

}  // namespace paceline
