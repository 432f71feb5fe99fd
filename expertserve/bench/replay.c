/*
 * Replays selections against a cache of slots, and measures how far apart the uses of an expert are.
 *
 * Selections come as groups: the distinct experts that one step of one layer chose, as keys. What of a group has a slot
 * is a hit, whatever the misses of the same group evict; misses then take slots one after the other. The victim is the
 * resident key with the least (score, last use, key), kept in a binary heap that knows where each key stands.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { STEP = 0xFFFF, RECORD = 4 };
enum policy { HOTNESS, RECENCY, OPTIMUM };
static const double RESCALE_ABOVE = 1e100;

/* Groups of a trace's records: keys of distinct experts in the order in which a lane takes them, the pairs of each, and
 * of each group its end in `keys`, its rows, its layer and its step. Keys of layer l begin at first[l]; a layer the
 * header does not name, or an expert beyond those of its layer, ends the trace, as does a record that is cut short.
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

/* Divides all scores by `increment`, which may make neighbours equal: the heap is built again. */
static void rescale(struct heap *h, int64_t num_keys, double increment) {
    for (int64_t key = 0; key < num_keys; key++) h->score[key] /= increment;
    for (int64_t at = h->size / 2 - 1; at >= 0; at--) settle(h, at, h->keys[at]);
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

struct cache {
    struct heap order;
    int32_t *hits, *misses; /* of the present group */
    double increment;       /* hotness grows by ever more instead of decaying */
    int64_t clock;
};

static void advance(struct cache *c, int64_t step, double decay, int64_t num_keys) {
    for (; c->clock < step; c->clock++) {
        c->increment /= decay;
        if (c->increment > RESCALE_ABOVE) {
            rescale(&c->order, num_keys, c->increment);
            c->increment = 1.0;
        }
    }
}

static void insert_all(struct heap *h, const int32_t *keys, int64_t count) {
    for (int64_t i = 0; i < count; i++) insert(h, keys[i]);
}

/* Gives each missed key a slot. `held` hits are no victims while others are left; with `spare` neither is what is
 * hotter than the key that needs a slot, while that leaves one. Returns the hits still held. */
static int64_t fill(struct cache *c, int64_t slots, int64_t misses, int64_t held, int spare) {
    struct heap *h = &c->order;
    for (int64_t i = 0; i < misses; i++) {
        const int32_t key = c->misses[i];
        if (h->size + held == slots) {
            if (held && (!h->size || (spare && h->score[h->keys[0]] > h->score[key]))) {
                insert_all(h, c->hits, held);
                held = 0;
            }
            take_out(h, h->keys[0]);
        }
        insert(h, key);
    }
    return held;
}

/* Hits of each group. weights: what a selection adds to hotness, for HOTNESS. spare: of each group, whether a miss
 * leaves hotter keys alone while it can. Returns 0, or -1 where memory ran out. */
EXPORT int64_t replay_hits(int64_t policy, double decay, int64_t num_keys, int64_t slots, int64_t groups,
                           const int32_t *keys, const double *weights, const int64_t *ends, const int64_t *step_of,
                           const uint8_t *spare, int32_t *hits) {
    const size_t count = (size_t)num_keys;
    struct cache c = {.increment = 1.0};
    struct heap *h = &c.order;
    h->keys = malloc(sizeof *h->keys * count);
    h->at = malloc(sizeof *h->at * count);
    h->score = calloc(count, sizeof *h->score);
    h->used = malloc(sizeof *h->used * count);
    c.hits = malloc(sizeof *c.hits * count);
    c.misses = malloc(sizeof *c.misses * count);
    int64_t *next = policy == OPTIMUM ? next_uses(num_keys, groups, keys, ends) : NULL;
    const int whole = h->keys && h->at && h->score && h->used && c.hits && c.misses && (next || policy != OPTIMUM);
    if (whole) {
        memset(h->at, -1, sizeof *h->at * count);
        memset(h->used, -1, sizeof *h->used * count);
    }
    for (int64_t g = 0, i = 0; whole && g < groups; g++) {
        int64_t found = 0, missed = 0, held = 0;
        if (policy == HOTNESS) advance(&c, step_of[g], decay, num_keys);
        for (; i < ends[g]; i++) {
            const int32_t key = keys[i];
            if (h->at[key] >= 0) {
                take_out(h, key);
                c.hits[found++] = key;
            } else {
                c.misses[missed++] = key;
            }
            if (policy == HOTNESS && h->used[key] != step_of[g]) h->score[key] += weights[i] * c.increment;
            if (policy == OPTIMUM) h->score[key] = -(double)next[i];
            h->used[key] = policy == HOTNESS ? step_of[g] : g;
        }
        if (policy == HOTNESS) {
            held = found;
        } else {
            insert_all(h, c.hits, found);
        }
        held = fill(&c, slots, missed, held, spare[g]);
        insert_all(h, c.hits, held);
        hits[g] = (int32_t)found;
    }
    free(next);
    free(h->keys);
    free(h->at);
    free(h->score);
    free(h->used);
    free(c.hits);
    free(c.misses);
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
