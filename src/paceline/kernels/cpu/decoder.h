// A packed decoder and its forward pass.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "attention.h"
#include "group.h"
#include "matrix.h"
#include "team.h"

namespace paceline {

struct Spec {
    int32_t vocab, hidden, intermediate, heads, kv_heads, head_dim, layers, ropes;
    int32_t gelu, qk_norm, post_norms, tied, captured;
    int32_t attention_input;                   // elements of the rows that queries, keys and values are made of
    DType dtype;
    float norm_eps, attn_scale, embed_scale;
    const int32_t *windows, *layer_ropes;      // [layers]
    const float *inv_freq, *rope_scale;        // [ropes, head_dim / 2], [ropes]
    const int32_t *capture;                    // [captured] layers whose entry is kept; `layers` = what the last one gives
};

enum class MatrixId : int32_t { qkv, o, gate_up, down, embed, head, join, fc };
enum class VectorId : int32_t {
    attn_norm, mlp_norm, q_norm, k_norm, post_attn_norm, post_mlp_norm,
    qkv_bias, o_bias, gate_bias, up_bias, down_bias, final_norm,
    embed_norm, hidden_norm, input_norm, fc_norms, count  // of a draft head
};

struct Layer {
    Matrix qkv, o, gate_up, down;
    int window, rope;
};

// One allocation for all packed weights, in the order a pass reads them; huge pages where the system has them.
class Arena {
  public:
    explicit Arena(size_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    uint8_t* take(size_t bytes);
    const uint8_t* first() const { return base_ + start_; }

  private:
    uint8_t* base_;
    size_t bytes_, start_ = 0, used_ = 0;
};

// features: [slots, captured, hidden] in the type of the keys, null = nothing is kept.
struct KvView {
    uint8_t *keys, *values, *features;
    int64_t layer_bytes;
    int32_t slots;
};

// A matrix of that shape, without memory yet.
Matrix shaped(DType dtype, int n, int k);

// Rows of a matrix to be packed.
struct Part {
    const uint8_t* data;
    int32_t dtype, rows;
};

class Decoder {
  public:
    Decoder(const Spec& spec, int threads, const int* cores, int num_cores);

    // Sources of qkv and gate_up are concatenated by the caller's order: q, k, v and gate, up.
    void pack(int layer, MatrixId id, const Part* parts, int count) { pack(matrix(layer, id), id, parts, count); }
    void pack(const Matrix& m, MatrixId id, const Part* parts, int count);
    void set_vector(int layer, VectorId id, const float* data, int count);

    // Passes sum their branches over the ranks of a group, and compute their share of the logits. Null = a whole model.
    void join(Group* group) { group_ = group; }

    // 0, or the number of the first broken rule (see api.cpp). vocab: token ids are below it.
    int check(const Batch& batch, const KvView& kv, int vocab) const;
    int check(const Batch& batch, const KvView& kv) const { return check(batch, kv, spec_.vocab); }
    // depth: layers that run before the final norm. A pass over fewer than all keeps no features.
    void forward(const Batch& batch, const KvView& kv, int depth, float* logits);

    uint64_t read_weights();

    // Of the matrices that every pass reads; an untied embedding is not among them.
    size_t weight_bytes() const { return weight_bytes_; }

  private:
    friend class Stages;
    friend class Pass;
    friend class HeadPass;
    friend class Head;
    Matrix& matrix(int layer, MatrixId id);
    const float* vector(int layer, VectorId id) const;
    DType kv_dtype() const { return spec_.dtype == DType::f32 ? DType::f32 : DType::bf16; }

    Spec spec_;
    HeadShape shape_;
    std::vector<Layer> layers_;
    std::vector<std::vector<float>> ropes_;
    std::vector<float> rope_scale_;
    std::vector<int> columns_;                 // [layers + 1] of the features, -1 = not captured
    std::vector<std::vector<float>> vectors_;  // [layer, VectorId]; final_norm is kept with layer 0
    Matrix embed_, head_;
    size_t weight_bytes_ = 0;
    std::unique_ptr<Arena> arena_;
    Team team_;
    Group* group_ = nullptr;

    // Reused between passes. Each has one row stride for life, so that padding stays zero.
    std::vector<float> residual_, normed_, qkv_, attended_, gated_, branch_, states_, angles_;
    std::vector<uint8_t> acts_;
    std::vector<AttentionScratch> scratch_;  // one per worker
};

}  // namespace paceline
