// The forward pass: one parallel region, a barrier after every stage.
#include "stages.h"

namespace paceline {

class Pass : Stages {
  public:
    Pass(Decoder& decoder, const Batch& batch, const KvView& kv, int depth, float* logits)
        : Stages(decoder, batch, kv), depth_(depth), logits_(logits) {
        // Alike on every rank of a group, also where nothing is kept: they sum the same rows.
        ends_captured_ = depth == s_.layers && decoder.columns_[depth] >= 0;
        reserve(0);
    }

    void run(int worker) noexcept {
        const int tokens = b_.tokens_count;
        team_.each(worker, tokens, [&](int t) { embed(t); });
        for (int i = 0; i < depth_; i++) {
            // The last layer serves the wanted logits alone, unless every token's features need it.
            const bool final = i == depth_ - 1 && !ends_captured_;
            if (!layer(worker, i, final)) return;
            const float* next = i == depth_ - 1 ? d_.vector(0, VectorId::final_norm) : d_.vector(i + 1, VectorId::attn_norm);
            team_.each(worker, final ? b_.logits_count : tokens, [&](int r) {
                const int t = final ? b_.logit_rows[r] : r;
                join(i, VectorId::post_mlp_norm, r, t, next);
                capture(i + 1, t);
            });
        }
        if (b_.logits_count == 0) return;
        if (ends_captured_) team_.each(worker, b_.logits_count, [&](int r) { normalise(r, b_.logit_rows[r], d_.vector(0, VectorId::final_norm)); });
        linear(worker, d_.head_, b_.logits_count, nullptr, logits_, s_.vocab, s_.vocab, d_.group_);
        if (d_.group_) meet(worker);
    }

  private:
    void embed(int t) {
        float* x = d_.residual_.data() + t * hidden_;
        unpack_row(d_.embed_, b_.tokens[t], x);
        // Padding meets zero weights only, and zero times what a broken pass left there would be NaN.
        std::fill(x + s_.hidden, x + hidden_, 0.0f);
        for (size_t i = 0; i < hidden_; i++) x[i] *= s_.embed_scale;
        capture(0, t);
        normalise(t, t, d_.vector(0, VectorId::attn_norm));
        turn(t);
    }

    // Keeps a token's residual as it enters a layer; beyond the last one, as it enters the final norm.
    void capture(int layer, int t) const {
        const int column = depth_ == s_.layers && kv_.features ? d_.columns_[layer] : -1;
        if (column < 0) return;
        const size_t row = (size_t)b_.slots[t] * s_.captured + column;
        store_cache(d_.residual_.data() + t * hidden_, s_.hidden, kv_.features + row * s_.hidden * element());
    }

    const int depth_;
    float* const logits_;
    bool ends_captured_;
};

void Decoder::forward(const Batch& batch, const KvView& kv, int depth, float* logits) {
    if (batch.tokens_count == 0) return;
    Pass pass(*this, batch, kv, depth, logits);
    const std::function<void(int)> job = [&](int worker) { pass.run(worker); };
    team_.run(job);
}

}  // namespace paceline
