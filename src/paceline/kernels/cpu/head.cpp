#include "head.h"

#include "stages.h"

namespace paceline {

namespace {

int wide(const HeadSpec& s) { return (int)round_up(std::max(2 * s.block.hidden, s.features * s.target_hidden), 64); }
int narrow(const HeadSpec& s) { return (int)round_up(std::max(s.block.hidden, s.target_hidden), 64); }

void read_row(const uint8_t* data, DType dtype, int count, float* out) {
    if (dtype == DType::f32) {
        std::memcpy(out, data, count * sizeof(float));
        return;
    }
    int i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, from_bf16(load_as<v16h>(data + i * 2)));
    for (; i < count; i++) out[i] = from_bf16(load_as<uint16_t>(data + i * 2));
}

// The batch of a chain's next guesses, one per chain.
class Links {
  public:
    Links(const Batch& roots, const Chain& chain) : roots_(roots), chain_(chain), rows_(roots.logits_count), batch_(roots) {
        for (std::vector<int32_t>* column : {&tokens_, &positions_, &slots_, &table_rows_, &prefix_, &start_, &length_, &all_})
            column->resize(rows_);
        for (int r = 0; r < rows_; r++) {
            const int root = roots.logit_rows[r];
            all_[r] = r;
            table_rows_[r] = roots.rows[root];
            prefix_[r] = roots.prefix_len[root];
            start_[r] = (int32_t)path_.size();
            length_[r] = roots.path_len[root];
            const int32_t* path = roots.path_slots + roots.path_start[root];
            path_.insert(path_.end(), path, path + length_[r]);
            path_.insert(path_.end(), chain.slots + (size_t)r * (chain.steps - 1), chain.slots + (size_t)(r + 1) * (chain.steps - 1));
        }
        batch_.tokens_count = batch_.logits_count = rows_;
        batch_.paths_count = (int)path_.size();
        batch_.tokens = tokens_.data();
        batch_.positions = positions_.data();
        batch_.slots = slots_.data();
        batch_.rows = table_rows_.data();
        batch_.prefix_len = prefix_.data();
        batch_.path_start = start_.data();
        batch_.path_len = length_.data();
        batch_.path_slots = path_.data();
        batch_.logit_rows = all_.data();
    }

    // The guesses that step `step - 1` made; a chain that has none goes on for nothing.
    const Batch& step(int step, const int32_t* tokens) {
        for (int r = 0; r < rows_; r++) {
            const int32_t token = tokens[((size_t)r * chain_.steps + step - 1) * chain_.count];
            tokens_[r] = std::max(0, token);
            positions_[r] = roots_.positions[roots_.logit_rows[r]] + step;
            slots_[r] = chain_.slots[(size_t)r * (chain_.steps - 1) + step - 1];
            length_[r]++;
        }
        return batch_;
    }

  private:
    const Batch& roots_;
    const Chain& chain_;
    const int rows_;
    Batch batch_;
    std::vector<int32_t> tokens_, positions_, slots_, table_rows_, prefix_, start_, length_, all_, path_;
};

}  // namespace

class HeadPass : Stages {
  public:
    HeadPass(Head& head, const Batch& batch, const KvView& kv, const float* hidden, int module, float* logits, float* fed)
        : Stages(head.blocks_, batch, kv), h_(head), hidden_in_(hidden), module_(module), logits_(logits), fed_(fed) {
        reserve(2 * s_.hidden);
    }

    void run(int worker) noexcept {
        const int tokens = b_.tokens_count, rows = b_.logits_count;
        team_.each(worker, tokens, [&](int t) { enter(t, h_.rows_[worker].data()); });
        if (h_.spec_.joined) {
            linear(worker, h_.joins_[module_], tokens, nullptr, d_.residual_.data(), hidden_, (int)hidden_);
            team_.each(worker, tokens, [&](int t) { normalise(t, t, d_.vector(module_, VectorId::attn_norm)); });
        }
        if (!layer(worker, module_, true)) return;
        team_.each(worker, rows, [&](int r) { leave(r, b_.logit_rows[r]); });
        linear(worker, d_.head_, rows, nullptr, logits_, s_.vocab, s_.vocab);
    }

  private:
    // Prepares what the first product reads: norms of the token's embedding and of the hidden state, side by side.
    void enter(int t, float* both) {
        float *x = d_.residual_.data() + t * hidden_, *normed = both + wide(h_.spec_);
        const int hidden = s_.hidden;
        std::memcpy(x, hidden_in_ + (size_t)t * hidden, hidden * sizeof(float));
        std::fill(x + hidden, x + hidden_, 0.0f);
        if (h_.spec_.zero_first && b_.positions[t] == 0) std::fill(normed, normed + hidden, 0.0f);
        else h_.embed(b_.tokens[t], normed);
        std::fill(normed + hidden, normed + hidden_, 0.0f);
        norm(normed, VectorId::embed_norm, normed);
        std::memcpy(both, normed, hidden * sizeof(float));
        norm(x, h_.spec_.joined ? VectorId::hidden_norm : VectorId::attn_norm, normed);
        std::memcpy(both + hidden, normed, hidden * sizeof(float));
        std::fill(both + 2 * hidden, both + round_up(2 * hidden, 64), 0.0f);
        if (h_.spec_.norm_before_residual) std::memcpy(x, normed, hidden * sizeof(float));
        prepare(both, 2 * hidden, t);
        turn(t);
    }

    void norm(const float* x, VectorId id, float* out) const {
        rms_norm(x, d_.vector(module_, id), (int)hidden_, s_.hidden, s_.norm_eps, out);
    }

    void leave(int row, int token) {
        join(module_, VectorId::post_mlp_norm, row, token, d_.vector(module_, VectorId::final_norm));
        const float* back = h_.spec_.norm_output ? d_.normed_.data() + row * hidden_ : d_.residual_.data() + token * hidden_;
        std::memcpy(fed_ + (size_t)row * s_.hidden, back, s_.hidden * sizeof(float));
    }

    Head& h_;
    const float* const hidden_in_;
    const int module_;
    float* const logits_;
    float* const fed_;
};

Head::Head(const HeadSpec& spec, int threads, const int* cores, int num_cores)
    : spec_(spec), blocks_(spec.block, threads, cores, num_cores), joins_(spec.joined ? spec.block.layers : 0) {
    const Spec& s = spec.block;
    std::vector<Matrix*> all;
    for (Matrix& join : joins_) {
        join = shaped(s.dtype, s.hidden, 2 * s.hidden);
        all.push_back(&join);
    }
    if (spec.fused) {
        fc_ = shaped(s.dtype, s.hidden, spec.features * spec.target_hidden);
        all.push_back(&fc_);
    }
    for (Matrix* m : all) own_bytes_ += round_up(m->bytes(), 64);
    arena_.reset(new Arena(own_bytes_));
    for (Matrix* m : all) m->data = arena_->take(m->bytes());
    rows_.assign(threads, std::vector<float>(wide(spec) + narrow(spec)));
}

void Head::pack(int module, MatrixId id, const Part* parts, int count) {
    if (id == MatrixId::join) blocks_.pack(joins_[module], id, parts, count);
    else if (id == MatrixId::fc) blocks_.pack(fc_, id, parts, count);
    else blocks_.pack(module, id, parts, count);
}

void Head::embed(int token, float* out) const {
    const int hidden = spec_.block.hidden;
    const size_t bytes = (size_t)hidden * (spec_.embed_dtype == DType::f32 ? 4 : 2);
    read_row(spec_.embed + token * bytes, spec_.embed_dtype, hidden, out);
}

// out = a row's features side by side, as fc reads them. padded: room for one feature.
void Head::gather(const uint8_t* features, DType dtype, float* padded, float* out) const {
    const int width = spec_.target_hidden, total = spec_.features * width, stride = (int)round_up(width, 64);
    const float eps = spec_.block.norm_eps;
    const float* norms = blocks_.vector(0, VectorId::fc_norms);
    for (int i = 0; i < spec_.features; i++) {
        read_row(features + (size_t)i * width * (dtype == DType::f32 ? 4 : 2), dtype, width, padded);
        std::fill(padded + width, padded + stride, 0.0f);
        if (norms) rms_norm(padded, norms + (size_t)i * stride, stride, width, eps, padded);
        std::memcpy(out + (size_t)i * width, padded, width * sizeof(float));
    }
    std::fill(out + total, out + round_up(total, 64), 0.0f);
    const float* whole = blocks_.vector(0, VectorId::input_norm);
    if (whole) rms_norm(out, whole, (int)round_up(total, 64), total, eps, out);
}

void Head::fuse(const uint8_t* features, DType dtype, int rows, float* out) {
    const int total = spec_.features * spec_.target_hidden, hidden = spec_.block.hidden;
    const size_t row_bytes = (size_t)total * (dtype == DType::f32 ? 4 : 2), act = act_row_bytes(spec_.block.dtype, total);
    constexpr int kRows = 256;
    grow(blocks_.acts_, std::min(rows, kRows) * act);
    for (int first = 0; first < rows; first += kRows) {
        const int count = std::min(kRows, rows - first);
        const uint8_t* from = features + first * row_bytes;
        float* to = out + (size_t)first * hidden;
        const std::function<void(int)> job = [&](int worker) {
            float* row = rows_[worker].data();
            blocks_.team_.each(worker, count, [&](int r) {
                gather(from + r * row_bytes, dtype, row + wide(spec_), row);
                if (spec_.fused) prepare_row(spec_.block.dtype, row, total, blocks_.acts_.data() + r * act);
                else std::memcpy(to + (size_t)r * hidden, row, hidden * sizeof(float));
            });
            if (!spec_.fused) return;
            blocks_.team_.each(worker, fc_.panels(), [&](int p) {
                const int width = std::min(kPanel, hidden - p * kPanel);
                panel_product(fc_, p, blocks_.acts_.data(), count, [](int, int) {}, [&](int at, int tile_rows, float* tile) {
                    for (int r = 0; r < tile_rows; r++)
                        std::memcpy(to + (size_t)(at + r) * hidden + p * kPanel, tile + r * kPanel, width * sizeof(float));
                });
            });
        };
        blocks_.team_.run(job);
    }
}

void Head::forward(const Batch& batch, const KvView& kv, const float* hidden, int module, float* logits, float* fed) {
    if (batch.tokens_count == 0) return;
    HeadPass pass(*this, batch, kv, hidden, module, logits, fed);
    const std::function<void(int)> job = [&](int worker) { pass.run(worker); };
    blocks_.team_.run(job);
}

void Head::chain(const Batch& batch, const KvView& kv, const float* hidden, const Chain& chain, int32_t* tokens, float* scores,
                 float* fed) {
    const int rows = batch.logits_count, vocab = spec_.block.vocab, width = spec_.block.hidden;
    grow(logits_, (size_t)rows * vocab);
    grow(fed_, (size_t)rows * width);
    Links links(batch, chain);
    std::vector<int64_t> positions(chain.positions, chain.positions + rows);
    std::vector<int32_t> found((size_t)rows * chain.count);
    std::vector<float> values(found.size());
    for (int step = 0; step < chain.steps; step++) {
        if (step == 0) forward(batch, kv, hidden, 0, logits_.data(), fed_.data());
        else forward(links.step(step, tokens), kv, fed_.data(), step % spec_.block.layers, logits_.data(), fed_.data());
        const SamplingRows sampled{rows, vocab, vocab, logits_.data(), chain.temperatures, chain.seeds, positions.data(), chain.ids};
        top_candidates(sampled, chain.count, found.data(), values.data());
        for (int r = 0; r < rows; r++) {
            const size_t from = (size_t)r * chain.count, to = ((size_t)r * chain.steps + step) * chain.count;
            std::copy_n(found.data() + from, chain.count, tokens + to);
            std::copy_n(values.data() + from, chain.count, scores + to);
            std::copy_n(fed_.data() + (size_t)r * width, width, fed + ((size_t)r * chain.steps + step) * width);
            positions[r]++;
        }
    }
}

}  // namespace paceline
