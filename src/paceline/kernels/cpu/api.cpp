// The C interface that bindings.py mirrors.
#include <exception>
#include <system_error>

#include "decoder.h"
#include "sampling.h"

using paceline::Batch;
using paceline::Decoder;

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

}  // namespace

extern "C" {

// Null when it cannot be made: *failure is then 1 for want of threads, 2 for want of memory.
Decoder* paceline_decoder_new(const paceline::Spec* spec, int32_t threads, const int32_t* cores, int32_t num_cores,
                              int32_t* failure) {
    try {
        return new Decoder(*spec, threads, cores, num_cores);
    } catch (const std::system_error&) {
        *failure = 1;
    } catch (const std::exception&) {
        *failure = 2;
    }
    return nullptr;
}

void paceline_decoder_free(Decoder* decoder) { delete decoder; }

int64_t paceline_weight_bytes(const Decoder* decoder) { return (int64_t)decoder->weight_bytes(); }

// Reads every packed weight once with the decoder's team: what a pass over one token cannot beat.
uint64_t paceline_read_weights(Decoder* decoder) { return decoder->read_weights(); }

int32_t paceline_pack(Decoder* decoder, int32_t layer, int32_t id, const Decoder::Part* parts, int32_t count) {
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

void paceline_coupled_argmax(const paceline::SamplingRows* rows, int64_t* tokens, uint8_t* finite) {
    paceline::coupled_argmax(*rows, tokens, finite);
}

void paceline_top_candidates(const paceline::SamplingRows* rows, int32_t wanted, int32_t* tokens, float* scores) {
    paceline::top_candidates(*rows, wanted, tokens, scores);
}

void paceline_noise(uint64_t seed, int64_t position, int32_t count, float* out) { paceline::noise_row(seed, position, count, out); }
}
