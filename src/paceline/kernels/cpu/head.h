// A packed draft head: blocks that read the target's features beside the tokens. See models/head_spec.py.
#pragma once
#include "decoder.h"
#include "sampling.h"

namespace paceline {

struct HeadSpec {
    Spec block;  // layers = modules, vocab = rows of the logits
    int32_t features, target_hidden, fused, joined, norm_before_residual, norm_output, zero_first;
    int32_t embed_rows;
    DType embed_dtype;     // f32 or bf16
    const uint8_t* embed;  // [embed_rows, hidden], the caller's, which keeps it as long as the head
};

// A chain of guesses below each wanted row of a batch. The last guess of a chain is not computed.
struct Chain {
    int32_t steps, count;
    const int32_t* slots;  // [rows, steps - 1] where the guesses' keys and values go
    const float* temperatures;
    const uint64_t* seeds;
    const int64_t* positions;  // of the first guess, as the noise has it
    const int64_t* ids;        // [vocab] token id of each row of the logits, null = the same
};

class Head {
  public:
    Head(const HeadSpec& spec, int threads, const int* cores, int num_cores);

    Decoder& blocks() { return blocks_; }
    void pack(int module, MatrixId id, const Part* parts, int count);

    // features: [rows, features, target_hidden] f32 or bf16; out: [rows, hidden].
    void fuse(const uint8_t* features, DType dtype, int rows, float* out);

    int check(const Batch& batch, const KvView& kv) const { return blocks_.check(batch, kv, spec_.embed_rows); }
    // hidden: [tokens, hidden], fed: [wanted, hidden], which may be the same memory.
    void forward(const Batch& batch, const KvView& kv, const float* hidden, int module, float* logits, float* fed);

    // tokens, scores: [rows, steps, count], each step as top_candidates has it. fed: [rows, steps, hidden], what each
    // step puts out.
    void chain(const Batch& batch, const KvView& kv, const float* hidden, const Chain& chain, int32_t* tokens, float* scores,
               float* fed);

    size_t weight_bytes() const { return blocks_.weight_bytes() + own_bytes_; }

  private:
    friend class HeadPass;
    void embed(int token, float* out) const;
    void gather(const uint8_t* features, DType dtype, float* padded, float* out) const;

    HeadSpec spec_;
    Decoder blocks_;
    Matrix fc_;
    std::vector<Matrix> joins_;
    size_t own_bytes_ = 0;
    std::unique_ptr<Arena> arena_;
    std::vector<std::vector<float>> rows_;  // of each worker: one row of the widest kind, and one of the target's features
    std::vector<float> logits_, fed_;
};

}  // namespace paceline
