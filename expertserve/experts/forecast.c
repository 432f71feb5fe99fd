/*
 * Forecasts, for each layer, how likely each expert is chosen by the layer's next run, and names victims by it.
 *
 * Likelihood is a logistic model, trained as it runs, of three things: how often the expert was chosen in the long run
 * (SLOW), how far the recent past (RECENT) departs from that, and which experts the last runs chose, through a matrix of
 * weights between the layer's experts. The last two start without influence and gain it as they prove right:
 *
 *   logit = slow + c0 (recent - slow) + c1 link,      link[e] = sum over a of trail[a] weight[a][e]
 *
 * c is fitted by Newton steps over a fading window with a ridge that pulls it to 0 (online Newton step; Hazan, Agarwal,
 * Kale 2007), so that routing without memory is judged by frequency alone, which is best there. A weight's step is that
 * of a Gaussian prior's posterior: it shrinks with what was seen, down to a floor, as text drifts. What is learned is not
 * only the next choice but, by temporal differences (Sutton 1988), a discounted sum of the choices to come.
 *
 * The expected number of runs until the next choice is one over the likelihood; of two layers the one that runs sooner
 * is needed sooner. The victim is the key whose next use is farthest.
 */
#include "forecast.h"

#include <math.h>
#include <string.h>

static const float SLOW = 0.9998F, RECENT = 0.985F; /* kept of a count with each run */
static const float TRAIL = 0.5F, TRAIL_LEAST = 0.1F, COUNT_LEAST = 1e-12F;
static const float PRIOR_SLOW = 2.0F, PRIOR_RECENT = 4.0F; /* runs that a prior counts as */
static const float WEIGHT_VARIANCE = 1.0F, WEIGHT_STEP_LEAST = 0.04F;
static const float FUTURE = 0.8F; /* of what is learned is the next run's forecast, the rest its choice */
static const double RIDGE = 4.0, WINDOW = 0.998, INFLUENCE_MOST = 1.5;
static const float LIKELY_LEAST = 1e-4F, LIKELY_MOST = 0.999F;
enum { PARTS = 2 };

struct fit {
    double normal[PARTS][PARTS], influence[PARTS];
};

struct forecast {
    int64_t layers, keys, learns, position; /* position: the layer that ran last */
    int64_t *first;
    double *runs_slow, *runs_recent; /* of each layer, faded like the counts */
    int64_t *learnable;              /* of each layer: the last run left a forecast to learn from */
    struct fit *fit;
    float **weight; /* of each layer, [experts][experts] */
    float *slow, *recent, *trail, *seen, *base, *drift, *link, *wait;
    float *chosen, *error, *before; /* scratch of one layer; before: base, drift, link, likelihood and trail */
};

enum { PER_KEY = 8, BEFORE = 5, SCRATCH = 2 + BEFORE };

static int64_t rounded(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

static int64_t widest(int64_t layers, const int64_t *first) {
    int64_t most = 0;
    for (int64_t l = 0; l < layers; l++) {
        if (first[l + 1] - first[l] > most) most = first[l + 1] - first[l];
    }
    return most;
}

static int64_t fixed_bytes(int64_t layers) {
    const size_t each = 2 * sizeof(double) + 2 * sizeof(int64_t) + sizeof(struct fit) + sizeof(float *);
    return rounded((int64_t)(sizeof(struct forecast) + sizeof(int64_t) + (size_t)layers * each));
}

int64_t forecast_bytes(int64_t layers, const int64_t *first, int64_t learns) {
    const int64_t keys = first[layers];
    int64_t floats = keys * (learns ? PER_KEY : 1) + widest(layers, first) * SCRATCH;
    for (int64_t l = 0; learns && l < layers; l++) floats += (first[l + 1] - first[l]) * (first[l + 1] - first[l]);
    return fixed_bytes(layers) + floats * (int64_t)sizeof(float);
}

static float *take(float **at, int64_t count) {
    float *taken = *at;
    *at += count;
    return taken;
}

void forecast_init(void *memory, int64_t layers, const int64_t *first, int64_t learns) {
    struct forecast *f = memory;
    float *at = (float *)((char *)memory + fixed_bytes(layers));
    f->layers = layers;
    f->keys = first[layers];
    f->learns = learns;
    f->runs_slow = (double *)(f + 1);
    f->runs_recent = f->runs_slow + layers;
    f->fit = (struct fit *)(f->runs_recent + layers);
    f->weight = (float **)(f->fit + layers);
    f->first = (int64_t *)(f->weight + layers);
    f->learnable = f->first + layers + 1;
    memcpy(f->first, first, sizeof *first * (size_t)(layers + 1));
    f->slow = take(&at, f->keys);
    const int64_t most = widest(layers, first);
    f->chosen = take(&at, most);
    f->error = take(&at, most);
    f->before = take(&at, BEFORE * most);
    if (!learns) return;
    float **parts[] = {&f->recent, &f->trail, &f->seen, &f->base, &f->drift, &f->link, &f->wait};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) *parts[i] = take(&at, f->keys);
    for (int64_t l = 0; l < layers; l++) {
        f->weight[l] = take(&at, (first[l + 1] - first[l]) * (first[l + 1] - first[l]));
        for (int64_t k = first[l]; k < first[l + 1]; k++) f->wait[k] = (float)(first[l + 1] - first[l]);
    }
}

float *forecast_hotness(struct forecast *f) { return f->slow; }

static float clipped(float likely) {
    return likely < LIKELY_LEAST ? LIKELY_LEAST : likely > LIKELY_MOST ? LIKELY_MOST : likely;
}

/* Forecasts the layer's next run from the counts and the trail. */
static void forecast_layer(struct forecast *f, int64_t layer) {
    const int64_t o = f->first[layer], n = f->first[layer + 1] - o;
    const double *c = f->fit[layer].influence;
    const float runs = (float)f->runs_slow[layer], runs_recent = (float)f->runs_recent[layer];
    const float c0 = (float)c[0], c1 = (float)c[1];
    float usual = 0.0F; /* share of the runs that choose an expert, over all of the layer */
    for (int64_t e = 0; e < n; e++) usual += f->slow[o + e];
    usual /= runs * (float)n;
    float *restrict link = f->link + o;
    memset(link, 0, sizeof *link * (size_t)n);
    for (int64_t a = 0; a < n; a++) {
        const float trail = f->trail[o + a], *restrict row = f->weight[layer] + a * n;
        if (trail == 0.0F) continue;
        for (int64_t e = 0; e < n; e++) link[e] += trail * row[e];
    }
    for (int64_t e = 0; e < n; e++) {
        const float slow = clipped((f->slow[o + e] + usual * PRIOR_SLOW) / (runs + PRIOR_SLOW));
        const float recent = clipped((f->recent[o + e] + slow * PRIOR_RECENT) / (runs_recent + PRIOR_RECENT));
        f->base[o + e] = logf(slow / (1.0F - slow));
        f->drift[o + e] = logf(recent / (1.0F - recent)) - f->base[o + e];
        f->wait[o + e] = 1.0F + expf(-(f->base[o + e] + c0 * f->drift[o + e] + c1 * link[e]));
    }
}

/* One Newton step of the influences, from what the forecast before missed. gradient and curvature are sums over e. */
static void fit_influence(struct fit *fit, const double gradient[PARTS], double curvature[PARTS][PARTS]) {
    double h[PARTS][PARTS], g[PARTS];
    for (int i = 0; i < PARTS; i++) {
        g[i] = gradient[i] - RIDGE * (1.0 - WINDOW) * fit->influence[i];
        for (int j = 0; j < PARTS; j++) {
            fit->normal[i][j] = fit->normal[i][j] * WINDOW + curvature[i][j];
            h[i][j] = fit->normal[i][j] + (i == j ? RIDGE : 0.0);
        }
    }
    const double det = h[0][0] * h[1][1] - h[0][1] * h[1][0];
    const double step[PARTS] = {(g[0] * h[1][1] - g[1] * h[0][1]) / det, (g[1] * h[0][0] - g[0] * h[1][0]) / det};
    for (int i = 0; i < PARTS; i++) {
        fit->influence[i] = fmin(fmax(fit->influence[i] + step[i], 0.0), INFLUENCE_MOST);
    }
}

/* Learns from the difference between the forecast before, kept in `before`, and the choice with the forecast now. */
static void learn(struct forecast *f, int64_t layer) {
    const int64_t o = f->first[layer], n = f->first[layer + 1] - o;
    const float *base = f->before, *drift = base + n, *link = drift + n, *likely = link + n, *trail = likely + n;
    const float c0 = (float)f->fit[layer].influence[0];
    float spread_usual = 0.0F;
    double gradient[PARTS] = {0}, curvature[PARTS][PARTS] = {{0}};
    for (int64_t e = 0; e < n; e++) {
        const float target = (1.0F - FUTURE) * f->chosen[e] + FUTURE / f->wait[o + e];
        const float error = target - likely[e], spread = likely[e] * (1.0F - likely[e]);
        gradient[0] += error * drift[e];
        gradient[1] += error * link[e];
        curvature[0][0] += spread * drift[e] * drift[e];
        curvature[0][1] += spread * drift[e] * link[e];
        curvature[1][1] += spread * link[e] * link[e];
        f->error[e] = target - 1.0F / (1.0F + expf(-(base[e] + c0 * drift[e] + link[e]))); /* at full influence */
        spread_usual += likely[e] * (1.0F - likely[e]) / (float)n;
    }
    curvature[1][0] = curvature[0][1];
    fit_influence(&f->fit[layer], gradient, curvature);
    for (int64_t a = 0; a < n; a++) {
        if (trail[a] == 0.0F) continue;
        float *restrict row = f->weight[layer] + a * n;
        const float *restrict error = f->error;
        const float step = fmaxf(WEIGHT_STEP_LEAST, 1.0F / (1.0F / WEIGHT_VARIANCE + f->seen[o + a] * spread_usual));
        const float pace = step * trail[a];
        for (int64_t e = 0; e < n; e++) row[e] += pace * error[e];
        f->seen[o + a] += trail[a] * trail[a];
    }
}

static double fade(float kept, double runs) { return runs == 1.0 ? kept : pow(kept, runs); }

/* Ages a layer's counts by `runs` runs and adds what those chose. */
static void count(float *counts, double *runs_counted, const float *chosen, int64_t n, float kept, double runs) {
    const double keeps = fade(kept, runs), gained = runs == 1.0 ? 1.0 : (1.0 - keeps) / (1.0 - kept);
    for (int64_t e = 0; e < n; e++) {
        const float counted = counts[e] * (float)keeps + chosen[e] * (float)gained;
        counts[e] = counted < COUNT_LEAST ? 0.0F : counted; /* arithmetic on denormal numbers is slow */
    }
    *runs_counted = *runs_counted * keeps + gained;
}

int64_t forecast_note(struct forecast *f, int64_t layer, int64_t chosen, const int64_t *keys, const double *share,
                      double runs) {
    const int64_t o = f->first[layer], n = f->first[layer + 1] - o;
    for (int64_t i = 0; i < chosen; i++) {
        if (keys[i] < o || keys[i] >= o + n) return -1;
    }
    memset(f->chosen, 0, sizeof *f->chosen * (size_t)n);
    for (int64_t i = 0; i < chosen; i++) f->chosen[keys[i] - o] = share ? (float)share[i] : 1.0F;
    count(f->slow + o, &f->runs_slow[layer], f->chosen, n, SLOW, runs);
    if (!f->learns) return 0;
    count(f->recent + o, &f->runs_recent[layer], f->chosen, n, RECENT, runs);
    const float *kept[] = {f->base, f->drift, f->link, NULL, f->trail};
    for (int64_t i = 0; i < BEFORE; i++) {
        if (kept[i]) memcpy(f->before + i * n, kept[i] + o, sizeof(float) * (size_t)n);
    }
    for (int64_t e = 0; e < n; e++) {
        f->before[3 * n + e] = 1.0F / f->wait[o + e];
        const float trail = f->chosen[e] > 0.0F ? 1.0F : f->trail[o + e] * TRAIL;
        f->trail[o + e] = share || trail < TRAIL_LEAST ? 0.0F : trail;
    }
    forecast_layer(f, layer);
    if (f->learnable[layer] && !share) learn(f, layer);
    f->learnable[layer] = 1;
    f->position = layer;
    return 0;
}

void forecast_seed(struct forecast *f, int64_t layer, double runs) {
    f->runs_slow[layer] = runs;
    if (f->learns) forecast_layer(f, layer);
}

/* How far ahead a layer's next run is, as a share of a step. */
static float ahead(const struct forecast *f, int64_t layer) {
    const int64_t layers = layer - f->position + (layer > f->position ? 0 : f->layers);
    return (float)layers / (float)f->layers;
}

/* Runs until the key is next needed, as far as is known. */
static float until(const struct forecast *f, int64_t key) {
    int64_t layer = 0;
    while (key >= f->first[layer + 1]) layer++;
    return f->wait[key] + ahead(f, layer);
}

int64_t forecast_victims(const struct forecast *f, const int32_t *slot_of, const int32_t *pins, const uint8_t *loading,
                         int64_t newcomer, int64_t most, int64_t *victims) {
    const float least = newcomer < 0 ? 0.0F : until(f, newcomer);
    float farthest[FORECAST_MOST];
    int64_t found = 0;
    for (int64_t layer = 0; layer < f->layers; layer++) {
        const float far_ahead = ahead(f, layer);
        for (int64_t key = f->first[layer]; key < f->first[layer + 1]; key++) {
            const float next = f->wait[key] + far_ahead;
            if (slot_of[key] < 0 || next < least || (found == most && next <= farthest[most - 1])) continue;
            if (pins[key] || loading[key]) continue;
            int64_t at = found < most ? found++ : most - 1;
            for (; at > 0 && farthest[at - 1] < next; at--) {
                farthest[at] = farthest[at - 1];
                victims[at] = victims[at - 1];
            }
            farthest[at] = next;
            victims[at] = key;
        }
    }
    return found;
}
