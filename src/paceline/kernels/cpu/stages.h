// The stages of a forward pass, which the whole decoder and a draft head put together in their own order. A stage is
// one loop of the team, with a barrier after it.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "decoder.h"
#include "rows.h"

namespace paceline {

class Stages {
  protected:
    Stages(Decoder& decoder, const Batch& batch, const KvView& kv)
        : d_(decoder), s_(decoder.spec_), b_(batch), kv_(kv), team_(decoder.team_),
          plan_(plan_attention(batch, decoder.shape_, decoder.team_.size())) {
        hidden_ = round_up(s_.hidden, 64);
        qkv_ = round_up((s_.heads + 2 * s_.kv_heads) * s_.head_dim, 64);
        attn_ = round_up(s_.heads * s_.head_dim, 64);
        gated_ = round_up(s_.intermediate, 64);
        angles_ = (size_t)s_.ropes * s_.head_dim;
    }

    // Allocates all that the pass needs: an exception cannot leave a thread of the team. widest: the longest row that
    // the pass prepares beside those of a layer.
    void reserve(int widest) {
        const size_t t = b_.tokens_count;
        size_t act = 0;
        for (int k : {widest, s_.hidden, s_.heads * s_.head_dim, s_.intermediate}) act = std::max(act, act_row_bytes(s_.dtype, k));
        grow(d_.residual_, t * hidden_);
        grow(d_.normed_, t * hidden_);
        grow(d_.qkv_, t * qkv_);
        grow(d_.attended_, t * attn_);
        grow(d_.gated_, t * gated_);
        grow(d_.branch_, t * hidden_);
        grow(d_.states_, t * s_.heads * plan_.segments * d_.shape_.state_floats());
        grow(d_.angles_, t * angles_);
        grow(d_.acts_, t * act);
        for (AttentionScratch& scratch : d_.scratch_) scratch.reserve(d_.shape_, plan_);
    }

    // A layer up to the branch that its last join adds, from prepared rows of all tokens to `rows` of them: all, or
    // (wanted) those whose logits are wanted. False when there is nothing more to do: no row, or the group is lost.
    bool layer(int worker, int i, bool wanted) {
        const int tokens = b_.tokens_count, rows = wanted ? b_.logits_count : tokens;
        const Layer& layer = d_.layers_[i];
        linear(worker, layer.qkv, tokens, d_.vector(i, VectorId::qkv_bias), d_.qkv_.data(), qkv_, (int)qkv_);
        team_.each(worker, tokens, [&](int t) { rotate_and_store(i, t); });
        if (rows == 0) return false;
        attention(worker, i);
        team_.each(worker, rows, [&](int r) { gather_attention(r, wanted ? b_.logit_rows[r] : r); });
        if (!branch(worker, layer.o, rows, d_.vector(i, VectorId::o_bias))) return false;
        team_.each(worker, rows, [&](int r) {
            join(i, VectorId::post_attn_norm, r, wanted ? b_.logit_rows[r] : r, d_.vector(i, VectorId::mlp_norm));
        });
        gated(worker, i, rows);
        team_.each(worker, rows, [&](int r) { prepare(d_.gated_.data() + r * gated_, s_.intermediate, r); });
        return branch(worker, layer.down, rows, d_.vector(i, VectorId::down_bias));
    }

    void prepare(const float* x, int k, int row) {
        const size_t bytes = act_row_bytes(s_.dtype, k);
        uint8_t* out = d_.acts_.data() + row * bytes;
        claim(out, bytes);
        touch(x, k * sizeof(float));
        prepare_row(s_.dtype, x, k, out);
    }

    // Sines and cosines of a token's position.
    void turn(int t) {
        const int half = s_.head_dim / 2;
        for (int r = 0; r < s_.ropes; r++) {
            float* cos = d_.angles_.data() + t * angles_ + (size_t)r * s_.head_dim;
            for (int i = 0; i < half; i++) {
                const double angle = d_.ropes_[r][i] * (float)b_.positions[t];
                cos[i] = (float)std::cos(angle) * d_.rope_scale_[r];
                cos[half + i] = (float)std::sin(angle) * d_.rope_scale_[r];
            }
        }
    }

    // acts row = norm of residual row
    void normalise(int row, int token, const float* weight) {
        float* out = d_.normed_.data() + row * hidden_;
        rms_norm(d_.residual_.data() + token * hidden_, weight, (int)hidden_, s_.hidden, s_.norm_eps, out);
        prepare(out, s_.hidden, row);
    }

    void join(int layer, VectorId post, int row, int token, const float* next) {
        float* branch = d_.branch_.data() + row * hidden_;
        if (d_.group_) d_.group_->sum(row, branch);
        else touch(branch, hidden_ * sizeof(float));
        const float* weight = d_.vector(layer, post);
        if (weight) rms_norm(branch, weight, (int)hidden_, s_.hidden, s_.norm_eps, branch);
        add(d_.residual_.data() + token * hidden_, branch, (int)hidden_);
        normalise(row, token, next);
    }

    // False when the group is lost: then every worker leaves the pass.
    bool meet(int worker) {
        team_.each(worker, 1, [&](int) { d_.group_->meet(); });
        return !d_.group_->lost();
    }

    // A layer's contribution to the residual stream, or this rank's part of it.
    bool branch(int worker, const Matrix& m, int rows, const float* bias) {
        float* out = d_.group_ ? d_.group_->partial() : d_.branch_.data();
        linear(worker, m, rows, bias, out, hidden_, (int)hidden_);
        return !d_.group_ || meet(worker);
    }

    // out[row, :columns] = acts row . m + bias; of the panels that are `shared`, a rank does its own.
    void linear(int worker, const Matrix& m, int rows, const float* bias, float* out, size_t stride, int columns,
                const Group* shared = nullptr) {
        touch(d_.acts_.data(), rows * act_row_bytes(s_.dtype, m.k));
        const int first = shared ? shared->begin(m.panels()) : 0, end = shared ? shared->end(m.panels()) : m.panels();
        team_.each(worker, end - first, [&](int at) {
            const int p = first + at;
            const int width = std::min(kPanel, columns - p * kPanel);
            const auto own = [&](int row, int count) {
                for (int r = row; r < row + count; r++) claim(out + r * stride + p * kPanel, width * sizeof(float));
            };
            panel_product(m, p, d_.acts_.data(), rows, own, [&](int row, int count, float* tile) {
                for (int r = 0; r < count; r++) {
                    float* x = tile + r * kPanel;
                    if (bias) add(x, bias + p * kPanel, kPanel);
                    float* to = out + (row + r) * stride + p * kPanel;
                    if (width == kPanel) std::memcpy(to, x, kPanel * sizeof(float));
                    else std::memcpy(to, x, width * sizeof(float));
                }
            });
        });
    }

    void gated(int worker, int layer, int rows) {
        const Matrix& m = d_.layers_[layer].gate_up;
        const float* gate_bias = d_.vector(layer, VectorId::gate_bias);
        const float* up_bias = d_.vector(layer, VectorId::up_bias);
        touch(d_.acts_.data(), rows * act_row_bytes(s_.dtype, m.k));
        team_.each(worker, m.panels(), [&](int p) {
            const auto own = [&](int row, int count) {
                for (int r = row; r < row + count; r++) claim(d_.gated_.data() + r * gated_ + p * 16, 64);
            };
            panel_product(m, p, d_.acts_.data(), rows, own, [&](int row, int count, float* tile) {
                for (int r = 0; r < count; r++) {
                    v16f gate = load(tile + r * kPanel), up = load(tile + r * kPanel + 16);
                    if (gate_bias) gate += load(gate_bias + p * 16);
                    if (up_bias) up += load(up_bias + p * 16);
                    store(d_.gated_.data() + (row + r) * gated_ + p * 16, (s_.gelu ? gelu_tanh(gate) : silu(gate)) * up);
                }
            });
        });
    }

    size_t element() const { return d_.kv_dtype() == DType::f32 ? 4 : 2; }

    uint8_t* cache_row(uint8_t* base, int layer, int slot) const {
        return base + layer * kv_.layer_bytes + (size_t)slot * s_.kv_heads * s_.head_dim * element();
    }

    void rotate_and_store(int layer, int t) {
        float* q = d_.qkv_.data() + t * qkv_;
        touch(q, qkv_ * sizeof(float));
        const int dim = s_.head_dim, half = dim / 2, kv_width = s_.kv_heads * dim;
        const float* cos = d_.angles_.data() + t * angles_ + (size_t)d_.layers_[layer].rope * dim;
        for (int h = 0; h < s_.heads + s_.kv_heads; h++) {
            if (s_.qk_norm) normalise_head(q + h * dim, d_.vector(layer, h < s_.heads ? VectorId::q_norm : VectorId::k_norm));
            rotate(q + h * dim, cos, cos + half, half);
        }
        const float* k = q + (size_t)s_.heads * dim;
        store_cache(k, kv_width, cache_row(kv_.keys, layer, b_.slots[t]));
        store_cache(k + kv_width, kv_width, cache_row(kv_.values, layer, b_.slots[t]));
    }

    void normalise_head(float* x, const float* weight) const {
        alignas(64) float padded[1024] = {};
        const int dim = s_.head_dim;
        std::memcpy(padded, x, dim * sizeof(float));
        rms_norm(padded, weight, (int)round_up(dim, 16), dim, s_.norm_eps, padded);
        std::memcpy(x, padded, dim * sizeof(float));
    }

    void store_cache(const float* x, int count, uint8_t* out) const {
        if (d_.kv_dtype() == DType::f32) {
            std::memcpy(out, x, count * sizeof(float));
            return;
        }
        int i = 0;
        for (; i + 16 <= count; i += 16) store_as(out + i * 2, to_bf16(load(x + i)));
        for (; i < count; i++) store_as(out + i * 2, to_bf16(x[i]));
    }

    void attention(int worker, int layer) {
        const Cache cache{cache_row(kv_.keys, layer, 0), cache_row(kv_.values, layer, 0)};
        team_.each(worker, plan_.units(), [&](int unit) {
            attend(d_.kv_dtype(), b_, plan_, d_.shape_, d_.layers_[layer].window, cache, d_.qkv_.data(), qkv_, unit,
                   d_.scratch_[worker], d_.states_.data());
        });
    }

    void gather_attention(int row, int token) {
        const size_t per_token = (size_t)s_.heads * plan_.segments * d_.shape_.state_floats();
        float* out = d_.attended_.data() + row * attn_;
        touch(d_.states_.data() + token * per_token, per_token * sizeof(float));
        const int last = plan_.split ? b_.positions[token] / kSegment : 0;
        finish_attention(d_.shape_, plan_.segments, last, d_.states_.data() + token * per_token, out);
        prepare(out, s_.heads * s_.head_dim, row);
    }

    Decoder& d_;
    const Spec& s_;
    const Batch& b_;
    const KvView& kv_;
    Team& team_;
    const AttentionPlan plan_;
    size_t hidden_, qkv_, attn_, gated_, angles_;
};

}  // namespace paceline
