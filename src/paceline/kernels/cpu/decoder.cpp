#include "decoder.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

#include "simd.h"

namespace paceline {

namespace {

constexpr size_t kHuge = size_t{2} << 20;

}  // namespace

Matrix shaped(DType dtype, int n, int k) {
    Matrix m;
    m.dtype = dtype;
    m.n = n;
    m.k = k;
    return m;
}

Arena::Arena(size_t bytes) : bytes_(round_up(bytes, kHuge) + kHuge) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(p);
    used_ = start_ = round_up(reinterpret_cast<size_t>(base_), kHuge) - reinterpret_cast<size_t>(base_);
#if defined(MADV_HUGEPAGE)
    madvise(base_ + used_, bytes_ - kHuge, MADV_HUGEPAGE);
#endif
}

Arena::~Arena() { munmap(base_, bytes_); }

uint8_t* Arena::take(size_t bytes) {
    uint8_t* at = base_ + used_;
    used_ += round_up(bytes, 64);
    return at;
}

Decoder::Decoder(const Spec& spec, int threads, const int* cores, int num_cores)
    : spec_(spec), shape_{spec.heads, spec.kv_heads, spec.head_dim, spec.attn_scale},
      vectors_((size_t)spec.layers * (size_t)VectorId::count), team_(threads, cores, num_cores), scratch_(threads) {
    const int half = spec.head_dim / 2, attn = spec.heads * spec.head_dim;
    for (int r = 0; r < spec.ropes; r++) {
        ropes_.emplace_back(spec.inv_freq + r * half, spec.inv_freq + (r + 1) * half);
        rope_scale_.push_back(spec.rope_scale[r]);
    }
    columns_.assign(spec.layers + 1, -1);
    for (int i = 0; i < spec.captured; i++) columns_[spec.capture[i]] = i;
    std::vector<Matrix*> all;
    layers_.resize(spec.layers);
    for (int i = 0; i < spec.layers; i++) {
        Layer& layer = layers_[i];
        layer.window = spec.windows[i];
        layer.rope = spec.layer_ropes[i];
        layer.qkv = shaped(spec.dtype, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.attention_input);
        layer.o = shaped(spec.dtype, spec.hidden, attn);
        layer.gate_up = shaped(spec.dtype, 2 * (int)round_up(spec.intermediate, 16), spec.hidden);
        layer.down = shaped(spec.dtype, spec.hidden, spec.intermediate);
        for (Matrix* m : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) all.push_back(m);
    }
    head_ = shaped(spec.dtype, spec.vocab, spec.hidden);
    embed_ = head_;
    all.push_back(&head_);
    for (Matrix* m : all) weight_bytes_ += round_up(m->bytes(), 64);
    if (!spec.tied) all.push_back(&embed_);
    arena_.reset(new Arena(weight_bytes_ + (spec.tied ? 0 : embed_.bytes())));
    for (Matrix* m : all) m->data = arena_->take(m->bytes());
    if (spec.tied) embed_ = head_;
    spec_.windows = spec_.layer_ropes = spec_.capture = nullptr;
    spec_.inv_freq = spec_.rope_scale = nullptr;
}

uint64_t Decoder::read_weights() {
    constexpr size_t piece = size_t{256} << 10;
    std::atomic<uint64_t> total{0};
    const std::function<void(int)> job = [&](int worker) {
        team_.each(worker, (int)(weight_bytes_ / piece), [&](int i) {
            v16u sum[4] = {};
            const uint8_t* p = arena_->first() + i * piece;
            for (size_t at = 0; at < piece; at += 256)
                for (int j = 0; j < 4; j++) sum[j] ^= load_as<v16u>(p + at + 64 * j);
            total += (sum[0] ^ sum[1] ^ sum[2] ^ sum[3])[0];
        });
    };
    team_.run(job);
    return total;
}

Matrix& Decoder::matrix(int layer, MatrixId id) {
    switch (id) {
        case MatrixId::qkv: return layers_[layer].qkv;
        case MatrixId::o: return layers_[layer].o;
        case MatrixId::gate_up: return layers_[layer].gate_up;
        case MatrixId::down: return layers_[layer].down;
        case MatrixId::embed: return embed_;
        default: return head_;
    }
}

void Decoder::pack(const Matrix& m, MatrixId id, const Part* parts, int count) {
    std::vector<const uint8_t*> rows((size_t)m.panels() * kPanel, nullptr);
    const DType dtype = (DType)parts[0].dtype;
    const size_t row_bytes = (size_t)m.k * (dtype == DType::f32 ? 4 : 2);
    size_t next = 0;
    for (int p = 0; p < count; p++)
        for (int i = 0; i < parts[p].rows; i++) {
            // A panel of gate_up is 16 gates and the 16 ups that belong to them.
            const size_t at = id == MatrixId::gate_up ? (size_t)i / 16 * kPanel + i % 16 + 16 * p : next++;
            rows[at] = parts[p].data + i * row_bytes;
        }
    const std::function<void(int)> job = [&](int worker) {
        team_.each(worker, m.panels(), [&](int panel) { pack_panel(m, panel, {rows.data() + (size_t)panel * kPanel, dtype}); });
    };
    team_.run(job);
}

void Decoder::set_vector(int layer, VectorId id, const float* data, int count) {
    std::vector<float>& v = vectors_[(size_t)layer * (size_t)VectorId::count + (size_t)id];
    v.assign(round_up(count, 64), 0.0f);
    std::copy(data, data + count, v.begin());
}

const float* Decoder::vector(int layer, VectorId id) const {
    const std::vector<float>& v = vectors_[(size_t)layer * (size_t)VectorId::count + (size_t)id];
    return v.empty() ? nullptr : v.data();
}

int Decoder::check(const Batch& b, const KvView& kv, int vocab) const {
    auto in = [](int32_t x, int32_t end) { return x >= 0 && x < end; };
    for (int t = 0; t < b.tokens_count; t++) {
        if (!in(b.tokens[t], vocab)) return 1;
        if (!in(b.slots[t], kv.slots)) return 2;
        if (!in(b.rows[t], b.rows_count) && b.prefix_len[t] > 0) return 3;
        if (!in(b.prefix_len[t], b.table_width + 1)) return 4;
        if (b.path_len[t] < 0 || b.path_start[t] < 0 || b.path_start[t] + b.path_len[t] > b.paths_count) return 5;
        if (b.positions[t] < 0 || b.prefix_len[t] + b.path_len[t] != b.positions[t] + 1) return 6;
        const bool repeats = t > 0 && b.rows[t] == b.rows[t - 1] && b.prefix_len[t] <= b.prefix_len[t - 1];
        const int32_t* row = b.tables + b.rows[t] * b.table_stride;
        for (int i = 0; !repeats && i < b.prefix_len[t]; i++)
            if (!in(row[i], kv.slots)) return 7;
    }
    for (int i = 0; i < b.paths_count; i++)
        if (!in(b.path_slots[i], kv.slots)) return 7;
    for (int i = 0; i < b.logits_count; i++)
        if (!in(b.logit_rows[i], b.tokens_count)) return 8;
    return 0;
}

}  // namespace paceline
