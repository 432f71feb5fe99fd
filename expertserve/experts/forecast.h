/* Forecasts of which experts each layer chooses next; see forecast.c. */
#ifndef EXPERTSERVE_FORECAST_H
#define EXPERTSERVE_FORECAST_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { FORECAST_MOST = 32 }; /* victims that are named at once */

struct forecast;

/* Bytes for `layers` layers; the keys of layer l are first[l] to first[l + 1]. With `learns` also for what it takes to
 * forecast; without, only hotness is kept. */
EXPORT int64_t forecast_bytes(int64_t layers, const int64_t *first, int64_t learns);

/* Makes a forecast in zeroed memory of that size, aligned to 8 bytes. */
EXPORT void forecast_init(void *memory, int64_t layers, const int64_t *first, int64_t learns);

/* Hotness of each key: how often it was chosen, fading. */
EXPORT float *forecast_hotness(struct forecast *f);

/* One run of a layer. keys: the `count` distinct ones that it chose; share: of each, how much of the tokens chose it, or
 * NULL for all; runs: how many runs it counts as. Only a single run is learned from. Returns 0, or -1 where a key is not
 * of the layer, and then nothing was done. */
EXPORT int64_t forecast_note(struct forecast *f, int64_t layer, int64_t count, const int64_t *keys, const double *share,
                             double runs);

/* A layer's forecast from hotness that was written from outside, of `runs` runs. */
EXPORT void forecast_seed(struct forecast *f, int64_t layer, double runs);

/* The `most` keys that have a slot and whose next use is farthest, the farthest first; pinned or loading ones are left
 * out, and so is what is needed sooner than `newcomer`, unless that is -1. Returns how many there are. */
EXPORT int64_t forecast_victims(const struct forecast *f, const int32_t *slot_of, const int32_t *pins,
                                const uint8_t *loading, int64_t newcomer, int64_t most, int64_t *victims);

#endif
