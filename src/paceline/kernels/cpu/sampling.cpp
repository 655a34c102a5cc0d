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

inline v16u load_ids(const int64_t* ids, int first, int vocab) {
    v16u v = {};
    for (int i = 0; i < std::min(16, vocab - first); i++) v[i] = (uint32_t)ids[first + i];
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

// The best tokens so far, best first. Tokens come in the order of their ids, so equal values keep the order they
// came in. A value of -inf never enters.
struct Ranking {
    int wanted;
    int32_t* tokens;
    float* values;
    int held = 0;

    // What a value must exceed to enter.
    float bar() const { return held == wanted ? values[wanted - 1] : -INFINITY; }

    void offer(float value, int token) {
        if (!(value > bar())) return;
        int at = held < wanted ? held++ : wanted - 1;
        for (; at > 0 && values[at - 1] < value; at--) {
            values[at] = values[at - 1];
            tokens[at] = tokens[at - 1];
        }
        values[at] = value;
        tokens[at] = token;
    }

    void offer_all(v16f scores, int first) {
        const v16i above = scores > splat(bar());
        if (!any(above)) return;
        for (int lane = 0; lane < 16; lane++)
            if (above[lane]) offer(scores[lane], first + lane);
    }
};

// At least e^x, at most 1.07 e^x, for x in [-80, 10] and beyond 10 at least 1: 1 + f >= 2^f on [0, 1], and the
// exponent field is read off a float that rounds by less than 1e-5.
inline v16f exp_bound(v16f x) {
    const v16f inside = vmax(vmin(x, splat(10.0f)), splat(-80.0f));
    return bits<v16f>(__builtin_convertvector(inside * 12102203.16f + 1065353216.0f, v16i));
}

// Ranks by logit / temperature + noise. Noise costs two logarithms; two bounds come first. Noise never exceeds
// kMostNoise. And noise above y needs a uniform below e^-y. Comparisons are such that NaN (from infinite quotients)
// passes, and `floor` lies below the bar by more than what all roundings can add up to.
void rank_noisy(const float* row, int vocab, float temperature, NoiseKeys keys, const int64_t* ids, Ranking& best) {
    const float inverse = 1.0f / temperature;
    for (int i = 0; i < vocab; i += 16) {
        const v16f x = load_scores(row, i, vocab);
        const float bar = best.bar();
        const float floor = bar - (1e-3f + 1e-6f * (std::fabs(bar) + 32.0f));
        const v16f rise = x * inverse - floor;
        if (!any(~(rise + kMostNoise <= 0.0f))) continue;
        const v16f v = uniform(keys, ids ? load_ids(ids, i, vocab) : bits<v16u>(lanes() + i));
        if (!any(v <= exp_bound(rise))) continue;
        best.offer_all(x / temperature + gumbel_of(v), i);
    }
}

void rank(const SamplingRows& rows, int r, Ranking& best) {
    const float* row = rows.logits + r * rows.stride;
    const float t = rows.temperatures[r];
    if (t != 0.0f) return rank_noisy(row, rows.vocab, t, noise_keys(rows.seeds[r], rows.positions[r]), rows.ids, best);
    for (int i = 0; i < rows.vocab; i += 16) best.offer_all(load_scores(row, i, rows.vocab), i);
}

// log of the sum of e^(x - top).
double log_sum(const float* row, int vocab, float top) {
    double total = 0.0;
    for (int start = 0; start < vocab; start += 1024) {
        v16f part = {};
        const int end = std::min(vocab, start + 1024);
        for (int i = start; i < end; i += 16) part += vexp(load_scores(row, i, vocab) - top);
        total += sum(part);
    }
    return std::log(total);
}

// Turns a ranking's values into scores and marks the places that hold nothing.
void finish(Ranking& best, double log_total) {
    const float top = best.held ? best.values[0] : 0.0f;
    const auto below = [&](int i) { return best.values[i] == top ? 0.0 : (double)best.values[i] - top; };
    if (std::isnan(log_total)) {
        double total = 0.0;
        for (int i = 0; i < best.held; i++) total += std::exp(below(i));
        log_total = std::log(total);
    }
    for (int i = best.held; i-- > 0;) best.values[i] = (float)(below(i) - log_total);
    for (int i = best.held; i < best.wanted; i++) {
        best.tokens[i] = -1;
        best.values[i] = -INFINITY;
    }
}

}  // namespace

void coupled_argmax(const SamplingRows& rows, int64_t* tokens, uint8_t* finite) noexcept {
    for (int r = 0; r < rows.count; r++) {
        const float* row = rows.logits + r * rows.stride;
        const float top = row_max(row, rows.vocab);
        finite[r] = std::isfinite(top);
        int32_t token = 0;
        float value;
        Ranking best{1, &token, &value};
        if (finite[r] && rows.temperatures[r] == 0.0f) token = first_equal(row, rows.vocab, top);
        else if (finite[r]) rank(rows, r, best);
        tokens[r] = rows.ids ? rows.ids[token] : token;
    }
}

void top_candidates(const SamplingRows& rows, int wanted, int32_t* tokens, float* scores) noexcept {
    for (int r = 0; r < rows.count; r++) {
        const float* row = rows.logits + r * rows.stride;
        const float top = row_max(row, rows.vocab);
        Ranking best{wanted, tokens + (int64_t)r * wanted, scores + (int64_t)r * wanted};
        if (std::isfinite(top)) rank(rows, r, best);
        for (int i = 0; rows.ids && i < best.held; i++) best.tokens[i] = (int32_t)rows.ids[best.tokens[i]];
        finish(best, rows.temperatures[r] == 0.0f ? log_sum(row, rows.vocab, top) : NAN);
    }
}

void noise_row(uint64_t seed, int64_t position, int count, float* out) noexcept {
    const NoiseKeys keys = noise_keys(seed, position);
    for (int i = 0; i < count; i += 16) {
        const v16f g = gumbel(keys, bits<v16u>(lanes() + i));
        std::memcpy(out + i, &g, std::min(16, count - i) * sizeof(float));
    }
}

}  // namespace paceline
