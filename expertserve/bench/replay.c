/*
 * Replays selections against a cache of slots, and measures how far apart the uses of an expert are.
 *
 * Selections come as groups: the distinct experts that one step of one layer chose, as keys. What of a group has a slot
 * is a hit, whatever the misses of the same group evict; misses then take slots one after the other. The victim is the
 * resident key with the least (score, last use, key), kept in a binary heap that knows where each key stands.
 */
#include "../experts/forecast.h"

#include <stdlib.h>
#include <string.h>

enum { STEP = 0xFFFF, RECORD = 4, GUESS = 1 };
enum policy { FREQUENCY, RECENCY, OPTIMUM };

/* Groups of a trace's records: keys of distinct experts in the order in which a lane takes them, the pairs of each, and
 * of each group its end in `keys`, its rows, its layer and its step. Keys of layer l begin at first[l]; a layer the
 * header does not name, or an expert beyond those of its layer, ends the trace, as does a record that is cut short;
 * guesses are passed over.
 * of_step has the decode and prefill rows of each step. counts is zeroed scratch for 65536. Returns groups, steps. */
EXPORT void replay_groups(const uint16_t *numbers, int64_t n, const int64_t *first, const int64_t *experts,
                         int32_t *counts, int32_t *keys, int32_t *pairs, int64_t *ends, int32_t *rows, int32_t *layers,
                         int64_t *step_of, int32_t *of_step, int64_t found[2]) {
    int64_t group = 0, step = 0, key = 0;
    for (int64_t at = 0; at + RECORD <= n;) {
        const uint16_t *record = numbers + at, *ids = record + RECORD;
        const int64_t layer = record[0], chosen = (int64_t)record[1] * record[2];
        at += RECORD;
        if (layer == STEP) {
            of_step[2 * step] = record[1];
            of_step[2 * step++ + 1] = record[2];
            continue;
        }
        if (at + chosen > n || !step || first[layer] < 0) break;
        if (record[3] == GUESS) {
            at += chosen;
            continue;
        }
        for (int64_t i = 0; i < chosen; i++) {
            if (ids[i] >= experts[layer]) goto end;
        }
        const int64_t start = key;
        for (int64_t i = 0; i < chosen; i++) {
            if (!counts[ids[i]]++) keys[key++] = ids[i];
        }
        if (record[1] > 1) { /* ascending, as batches are grouped */
            key = start;
            for (int64_t e = 0; e < experts[layer]; e++) {
                if (counts[e]) keys[key++] = (int32_t)e;
            }
        }
        for (int64_t i = start; i < key; i++) {
            pairs[i] = counts[keys[i]];
            counts[keys[i]] = 0;
            keys[i] += (int32_t)first[layer];
        }
        ends[group] = key;
        rows[group] = record[1];
        layers[group] = (int32_t)layer;
        step_of[group++] = step - 1;
        at += chosen;
    }
end:
    found[0] = group;
    found[1] = step;
}

/* Resident keys, the next victim first. */
struct heap {
    int64_t size;
    int32_t *keys;
    int32_t *at; /* where each key stands, -1: nowhere */
    double *score;
    int64_t *used;
};

static int before(const struct heap *h, int32_t a, int32_t b) {
    if (h->score[a] != h->score[b]) return h->score[a] < h->score[b];
    return h->used[a] != h->used[b] ? h->used[a] < h->used[b] : a < b;
}

static void place(struct heap *h, int64_t at, int32_t key) {
    h->keys[at] = key;
    h->at[key] = (int32_t)at;
}

/* Puts a key where it belongs, from a free place `at`. */
static void settle(struct heap *h, int64_t at, int32_t key) {
    for (int64_t up = (at - 1) / 2; at && before(h, key, h->keys[up]); up = (at - 1) / 2) {
        place(h, at, h->keys[up]);
        at = up;
    }
    for (int64_t down = 2 * at + 1; down < h->size; down = 2 * at + 1) {
        down += down + 1 < h->size && before(h, h->keys[down + 1], h->keys[down]);
        if (!before(h, h->keys[down], key)) break;
        place(h, at, h->keys[down]);
        at = down;
    }
    place(h, at, key);
}

static void insert(struct heap *h, int32_t key) { settle(h, h->size++, key); }

static void take_out(struct heap *h, int32_t key) {
    const int64_t at = h->at[key];
    const int32_t last = h->keys[--h->size];
    h->at[key] = -1;
    if (last != key) settle(h, at, last);
}

/* next[i]: the group that uses keys[i] next after its own; `groups` where none does. */
static int64_t *next_uses(int64_t num_keys, int64_t groups, const int32_t *keys, const int64_t *ends) {
    int64_t *next = malloc(sizeof *next * (size_t)((groups ? ends[groups - 1] : 0) + 1));
    int64_t *soonest = malloc(sizeof *soonest * (size_t)num_keys);
    for (int64_t key = 0; soonest && key < num_keys; key++) soonest[key] = groups;
    for (int64_t g = groups - 1; next && soonest && g >= 0; g--) {
        for (int64_t i = g ? ends[g - 1] : 0; i < ends[g]; i++) {
            next[i] = soonest[keys[i]];
            soonest[keys[i]] = g;
        }
    }
    if (!soonest) {
        free(next);
        next = NULL;
    }
    free(soonest);
    return next;
}

/* Hits of each group. weights: what a selection adds to the score, for FREQUENCY. Returns 0, or -1 where memory ran
 * out. */
EXPORT int64_t replay_hits(int64_t policy, int64_t num_keys, int64_t slots, int64_t groups, const int32_t *keys,
                           const double *weights, const int64_t *ends, int32_t *hits) {
    const size_t count = (size_t)num_keys;
    struct heap heap = {0}, *h = &heap;
    h->keys = malloc(sizeof *h->keys * count);
    h->at = malloc(sizeof *h->at * count);
    h->score = calloc(count, sizeof *h->score);
    h->used = malloc(sizeof *h->used * count);
    int32_t *missed = malloc(sizeof *missed * count);
    int64_t *next = policy == OPTIMUM ? next_uses(num_keys, groups, keys, ends) : NULL;
    const int whole = h->keys && h->at && h->score && h->used && missed && (next || policy != OPTIMUM);
    if (whole) {
        memset(h->at, -1, sizeof *h->at * count);
        memset(h->used, -1, sizeof *h->used * count);
    }
    for (int64_t g = 0, i = 0; whole && g < groups; g++) {
        int64_t misses = 0;
        for (; i < ends[g]; i++) {
            const int32_t key = keys[i];
            const int found = h->at[key] >= 0;
            if (found) take_out(h, key);
            if (policy == FREQUENCY) h->score[key] += weights[i];
            if (policy == OPTIMUM) h->score[key] = -(double)next[i];
            h->used[key] = g;
            hits[g] += found;
            if (found) {
                insert(h, key);
            } else {
                missed[misses++] = key;
            }
        }
        for (int64_t m = 0; m < misses; m++) {
            if (h->size == slots) take_out(h, h->keys[0]);
            insert(h, missed[m]);
        }
    }
    free(next);
    free(missed);
    free(h->keys);
    free(h->at);
    free(h->score);
    free(h->used);
    return whole ? 0 : -1;
}

/* The slot cache that serves: its victims are named by the forecast. */
struct slot_cache {
    struct forecast *forecast;
    int32_t *slot_of, *pins; /* slot_of: 0 where a key has a slot, else -1 */
    uint8_t *loading;        /* nothing ever is */
    int64_t *held, slots, used;
};

/* Gives a key a slot; returns 0 where every other is pinned, or needed sooner than it if those are to be spared. */
static int seat(struct slot_cache *c, int64_t key, int spare) {
    int64_t victim = 0;
    if (c->used == c->slots) {
        if (!forecast_victims(c->forecast, c->slot_of, c->pins, c->loading, spare ? key : -1, 1, &victim)) return 0;
        c->slot_of[victim] = -1;
    } else {
        c->used++;
    }
    c->slot_of[key] = 0;
    return 1;
}

static void hold(struct slot_cache *c, int64_t *count, int64_t key) {
    c->held[(*count)++] = key;
    c->pins[key]++;
}

static void let_go(struct slot_cache *c, int64_t *count) {
    while (*count) c->pins[c->held[--*count]]--;
}

/* Hits of one group, of which only the misses stay in `keys`. What has a slot is held while those are seated, for as
 * long as that leaves a slot. */
static int32_t play(struct slot_cache *c, int64_t n, int64_t *keys, int spare) {
    int64_t held = 0, missed = 0;
    for (int64_t i = 0; i < n; i++) {
        if (c->slot_of[keys[i]] == 0) {
            hold(c, &held, keys[i]);
        } else {
            keys[missed++] = keys[i];
        }
    }
    const int32_t found = (int32_t)held;
    int holding = 1;
    for (int64_t i = 0; i < missed; i++) {
        if (!seat(c, keys[i], spare)) {
            let_go(c, &held);
            holding = 0;
            seat(c, keys[i], 0);
        }
        if (holding) hold(c, &held, keys[i]);
    }
    let_go(c, &held);
    return found;
}

/* Hits of each group with the slot cache that serves. first: of each layer's keys; layer_of: place of each group's
 * layer; share: of each selection in a prefill, how much of its tokens made it; runs: what a group counts as, 0 for
 * decode. Returns 0, or -1 where memory ran out. */
EXPORT int64_t replay_forecast(int64_t layers, const int64_t *first, int64_t slots, int64_t groups, const int32_t *keys,
                               const double *share, const int64_t *ends, const int64_t *layer_of, const double *runs,
                               int32_t *hits) {
    const size_t count = (size_t)first[layers];
    struct slot_cache c = {.forecast = calloc(1, (size_t)forecast_bytes(layers, first, 1)), .slots = slots};
    c.slot_of = malloc(sizeof *c.slot_of * count);
    c.pins = calloc(count, sizeof *c.pins);
    c.loading = calloc(count, sizeof *c.loading);
    c.held = malloc(sizeof *c.held * count);
    int64_t *group = malloc(sizeof *group * count);
    const int whole = c.forecast && c.slot_of && c.pins && c.loading && c.held && group;
    if (whole) {
        memset(c.slot_of, -1, sizeof *c.slot_of * count);
        forecast_init(c.forecast, layers, first, 1);
    }
    for (int64_t g = 0, i = 0; whole && g < groups; g++) {
        const int64_t n = ends[g] - i;
        for (int64_t j = 0; j < n; j++) group[j] = keys[i + j];
        const int prefill = runs[g] > 0;
        forecast_note(c.forecast, layer_of[g], n, group, prefill ? share + i : NULL, prefill ? runs[g] : 1.0);
        hits[g] = play(&c, n, group, prefill);
        i = ends[g];
    }
    free(c.forecast);
    free(c.slot_of);
    free(c.pins);
    free(c.loading);
    free(c.held);
    free(group);
    return whole ? 0 : -1;
}

/* Of each selection, how many distinct keys were selected since the last time, itself included: the fewest slots with
 * which LRU has it. 0 where the key is new. `marks` [n + 1] and `last` [num_keys] are zeroed scratch: a Fenwick tree
 * with a one at the latest selection of each key, and where that is. */
EXPORT void replay_distances(int64_t n, const int32_t *keys, int32_t *marks, int64_t *last, int32_t *distance) {
    int32_t distinct = 0;
    for (int64_t i = 1; i <= n; i++) {
        const int32_t key = keys[i - 1];
        const int64_t before = last[key];
        distance[i - 1] = 0;
        if (before) {
            int32_t until = 0;
            for (int64_t at = before - 1; at > 0; at &= at - 1) until += marks[at];
            distance[i - 1] = distinct - until;
            for (int64_t at = before; at <= n; at += at & -at) marks[at]--;
        } else {
            distinct++;
        }
        for (int64_t at = i; at <= n; at += at & -at) marks[at]++;
        last[key] = i;
    }
}
