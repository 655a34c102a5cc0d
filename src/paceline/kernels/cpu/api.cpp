// The C interface that bindings.py mirrors.
#include <exception>
#include <system_error>

#include "decoder.h"
#include "head.h"
#include "sampling.h"

using paceline::Batch;
using paceline::Decoder;
using paceline::Head;

namespace {

// 0, or -1 when memory ran out.
template <class Work> int32_t guarded(Work&& work) noexcept {
    try {
        work();
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

// Null when it cannot be made: *failure is then 1 for want of threads, 2 for want of memory.
template <class Made, class Spec>
Made* made(const Spec& spec, int32_t threads, const int32_t* cores, int32_t num_cores, int32_t* failure) noexcept {
    try {
        return new Made(spec, threads, cores, num_cores);
    } catch (const std::system_error&) {
        *failure = 1;
    } catch (const std::exception&) {
        *failure = 2;
    }
    return nullptr;
}

}  // namespace

extern "C" {

Decoder* paceline_decoder_new(const paceline::Spec* spec, int32_t threads, const int32_t* cores, int32_t num_cores,
                              int32_t* failure) {
    return made<Decoder>(*spec, threads, cores, num_cores, failure);
}

void paceline_decoder_free(Decoder* decoder) { delete decoder; }

int64_t paceline_weight_bytes(const Decoder* decoder) { return (int64_t)decoder->weight_bytes(); }

// Reads every packed weight once with the decoder's team: what a pass over one token cannot beat.
uint64_t paceline_read_weights(Decoder* decoder) { return decoder->read_weights(); }

int32_t paceline_pack(Decoder* decoder, int32_t layer, int32_t id, const paceline::Part* parts, int32_t count) {
    return guarded([&] { decoder->pack(layer, (paceline::MatrixId)id, parts, count); });
}

int32_t paceline_set_vector(Decoder* decoder, int32_t layer, int32_t id, const float* data, int32_t count) {
    return guarded([&] { decoder->set_vector(layer, (paceline::VectorId)id, data, count); });
}

// 0 = done; 1.. = a rule of TokenBatch is broken (bindings.BATCH_RULES); -1 = out of memory.
int32_t paceline_forward(Decoder* decoder, const Batch* batch, const paceline::KvView* kv, int32_t depth, float* logits) {
    const int broken = decoder->check(*batch, *kv);
    return broken ? broken : guarded([&] { decoder->forward(*batch, *kv, depth, logits); });
}

Head* paceline_head_new(const paceline::HeadSpec* spec, int32_t threads, const int32_t* cores, int32_t num_cores,
                        int32_t* failure) {
    return made<Head>(*spec, threads, cores, num_cores, failure);
}

void paceline_head_free(Head* head) { delete head; }

// What set_vector takes: the head's blocks.
Decoder* paceline_head_blocks(Head* head) { return &head->blocks(); }

int64_t paceline_head_weight_bytes(const Head* head) { return (int64_t)head->weight_bytes(); }

int32_t paceline_head_pack(Head* head, int32_t module, int32_t id, const paceline::Part* parts, int32_t count) {
    return guarded([&] { head->pack(module, (paceline::MatrixId)id, parts, count); });
}

int32_t paceline_head_fuse(Head* head, const uint8_t* features, int32_t dtype, int32_t rows, float* out) {
    return guarded([&] { head->fuse(features, (paceline::DType)dtype, rows, out); });
}

// As paceline_forward.
int32_t paceline_head_forward(Head* head, const Batch* batch, const paceline::KvView* kv, const float* hidden, int32_t module,
                              float* logits, float* fed) {
    const int broken = head->check(*batch, *kv);
    return broken ? broken : guarded([&] { head->forward(*batch, *kv, hidden, module, logits, fed); });
}

// As paceline_forward; 2 also for a slot of the chain's own.
int32_t paceline_head_chain(Head* head, const Batch* batch, const paceline::KvView* kv, const float* hidden,
                            const paceline::Chain* chain, int32_t* tokens, float* scores, float* fed) {
    const int broken = head->check(*batch, *kv);
    if (broken) return broken;
    for (int64_t i = 0; i < (int64_t)batch->logits_count * (chain->steps - 1); i++)
        if (chain->slots[i] < 0 || chain->slots[i] >= kv->slots) return 2;
    return guarded([&] { head->chain(*batch, *kv, hidden, *chain, tokens, scores, fed); });
}

void paceline_coupled_argmax(const paceline::SamplingRows* rows, int64_t* tokens, uint8_t* finite) {
    paceline::coupled_argmax(*rows, tokens, finite);
}

void paceline_top_candidates(const paceline::SamplingRows* rows, int32_t wanted, int32_t* tokens, float* scores) {
    paceline::top_candidates(*rows, wanted, tokens, scores);
}

void paceline_noise(uint64_t seed, int64_t position, int32_t count, float* out) { paceline::noise_row(seed, position, count, out); }
}
