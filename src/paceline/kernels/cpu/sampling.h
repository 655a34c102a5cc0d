#pragma once
#include <cstdint>

namespace paceline {

struct SamplingRows {
    int32_t count, vocab;
    int64_t stride;
    const float* logits;
    const float* temperatures;
    const uint64_t* seeds;
    const int64_t* positions;
    const int64_t* ids;  // [vocab] token id of each place of a row, null = the place itself
};

// See kernels/reference/sampling.py; here too tokens are ids, not places. A row takes about as long as starting a thread, so there are none.
void coupled_argmax(const SamplingRows& rows, int64_t* tokens, uint8_t* finite) noexcept;

// tokens, scores: [rows.count, wanted], wanted at least 1.
void top_candidates(const SamplingRows& rows, int wanted, int32_t* tokens, float* scores) noexcept;

void noise_row(uint64_t seed, int64_t position, int count, float* out) noexcept;

}  // namespace paceline
