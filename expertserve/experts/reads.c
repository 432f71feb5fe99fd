/*
 * The reader threads: they keep the disk at queue depth without the interpreter, whose lock the forward needs.
 *
 * A fill is the reads of one expert. Urgent fills are read before idle ones, and an idle read begins only while no
 * urgent one is queued or under way. Every fill that was submitted comes back exactly once, whole or with its first
 * error, unless it was cancelled before any of its reads began; after an error the rest of the fill is not begun.
 * A slice counts as read only when every byte of it came from the file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum mode { DIRECT, BUFFERED, MAPPED };
enum { SHORT_READ = -1 }; /* otherwise an errno */

/* Reads in place of pread: bytes that came, or a negative errno. */
typedef int64_t (*read_fn)(int64_t fill, int64_t file, void *to, int64_t nbytes, int64_t offset);

struct source {
    int64_t mode;
    int64_t align;       /* of direct reads */
    int64_t shift_align; /* a slice may begin at a multiple of this in its region */
    const int64_t *fds;
    const int64_t *maps; /* where the files are mapped, in mode MAPPED */
    const int64_t *map_bytes;
    read_fn read; /* NULL: pread */
};

/* One slice, as the caller lays it out once for each expert. */
struct slice {
    int64_t file, offset, nbytes;
    int64_t region, region_bytes; /* where in the slot, and how much room there is */
};

struct result {
    int64_t id;
    int64_t asked; /* bytes asked of the file by reads that succeeded */
    int64_t done;  /* bytes that came of a failed read; of a mapped file its size */
    int64_t failed_slice;
    int64_t error;
    int64_t advised; /* slices whose read-ahead hint was accepted */
};

struct fill {
    struct fill *next;
    struct result result;
    char *slot;
    int urgent, count, begun, ended;
    struct slice slices[];
};

struct queue {
    struct fill *first, **last;
};

struct pool {
    struct source source;
    pthread_mutex_t lock;
    pthread_cond_t work, finished_one, thread_ended;
    struct queue urgent, idle, finished;
    int urgent_open; /* urgent reads queued or under way */
    int idle_running, idle_limit, reading, alive, closing;
    double busy_since, busy_s;
};

struct bounce {
    char *memory;
    int64_t nbytes;
};

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct timespec deadline_in(double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const int64_t ns = t.tv_nsec + (int64_t)(seconds * 1e9);
    t.tv_sec += ns / 1000000000;
    t.tv_nsec = ns % 1000000000;
    return t;
}

/* ---- queues ---- */

static void clear(struct queue *q) {
    q->first = NULL;
    q->last = &q->first;
}

static void append(struct queue *q, struct fill *f) {
    f->next = NULL;
    *q->last = f;
    q->last = &f->next;
}

static struct fill *find(const struct queue *q, int64_t id) {
    struct fill *f = q->first;
    while (f && f->result.id != id) {
        f = f->next;
    }
    return f;
}

static void take_out(struct queue *q, struct fill *f) {
    struct fill **at = &q->first;
    while (*at && *at != f) {
        at = &(*at)->next;
    }
    if (*at) {
        *at = f->next;
        if (q->last == &f->next) {
            q->last = at;
        }
    }
}

static void free_all(struct queue *q) {
    while (q->first) {
        struct fill *f = q->first;
        q->first = f->next;
        free(f);
    }
    clear(q);
}

/* ---- one slice ---- */

/* Reads until at least `needed` of `room` bytes came. Returns 0, an errno or SHORT_READ. */
static int64_t read_range(const struct source *s, int64_t fill, int64_t file, char *to, int64_t room, int64_t offset,
                          int64_t needed, int64_t *done) {
    for (*done = 0; *done < needed;) {
        int64_t got;
        if (s->read) {
            got = s->read(fill, file, to + *done, room - *done, offset + *done);
        } else {
            do {
                got = pread((int)s->fds[file], to + *done, (size_t)(room - *done), offset + *done);
            } while (got < 0 && errno == EINTR);
            got = got < 0 ? -errno : got;
        }
        if (got < 0) {
            return -got;
        }
        *done += got;
        if (got == 0 || (*done < needed && s->mode == DIRECT && *done % s->align)) {
            return SHORT_READ;
        }
    }
    return 0;
}

static int grow(struct bounce *b, int64_t nbytes) {
    if (b->nbytes < nbytes) {
        void *memory = NULL;
        if (posix_memalign(&memory, 4096, (size_t)nbytes)) {
            return 0;
        }
        free(b->memory);
        b->memory = memory;
        b->nbytes = nbytes;
    }
    return 1;
}

/*
 * The aligned range that encloses the slice lands in the region, and the slice begins `shift` bytes in; where a kernel
 * could not work at that shift the range lands in the bounce buffer and is copied. The padded range of a file's last
 * expert passes its end: what counts is the bytes needed.
 */
static int64_t read_direct(const struct source *s, int64_t fill, const struct slice *p, char *region, struct bounce *b,
                           struct result *r) {
    const int64_t shift = p->offset % s->align;
    const int64_t length = (shift + p->nbytes + s->align - 1) / s->align * s->align;
    const int straight = shift % s->shift_align == 0;
    if ((straight ? length : p->nbytes) > p->region_bytes) {
        return EOVERFLOW;
    }
    if (!straight && !grow(b, length)) {
        return ENOMEM;
    }
    char *to = straight ? region : b->memory;
    const int64_t error = read_range(s, fill, p->file, to, length, p->offset - shift, shift + p->nbytes, &r->done);
    if (error) {
        return error;
    }
    if (!straight) {
        memcpy(region, b->memory + shift, (size_t)p->nbytes);
    }
    r->asked += length;
    return 0;
}

static int64_t read_buffered(const struct source *s, int64_t fill, const struct slice *p, char *region, struct result *r) {
    if (p->nbytes > p->region_bytes) {
        return EOVERFLOW;
    }
    const int64_t error = read_range(s, fill, p->file, region, p->nbytes, p->offset, p->nbytes, &r->done);
    r->asked += error ? 0 : p->nbytes;
    return error;
}

/* A mapping of a file that shrinks is deadly to touch, so the size is looked at before every copy. */
static int64_t read_mapped(const struct source *s, const struct slice *p, char *region, struct result *r) {
    struct stat status;
    const int64_t end = p->offset + p->nbytes, page = sysconf(_SC_PAGESIZE);
    if (p->nbytes > p->region_bytes) {
        return EOVERFLOW;
    }
    if (fstat((int)s->fds[p->file], &status)) {
        return errno;
    }
    r->done = status.st_size < s->map_bytes[p->file] ? status.st_size : s->map_bytes[p->file];
    if (end > r->done) {
        return SHORT_READ;
    }
    char *map = (char *)(intptr_t)s->maps[p->file];
    const int64_t first = p->offset - p->offset % page;
    r->advised += madvise(map + first, (size_t)(end - first), MADV_WILLNEED) == 0;
    memcpy(region, map + p->offset, (size_t)p->nbytes);
    r->asked += p->nbytes;
    return 0;
}

static int64_t read_slice(const struct source *s, int64_t fill, const struct slice *p, char *region, struct bounce *b,
                          struct result *r) {
    switch (s->mode) {
    case DIRECT:
        return read_direct(s, fill, p, region, b, r);
    case MAPPED:
        return read_mapped(s, p, region, r);
    default:
        return read_buffered(s, fill, p, region, r);
    }
}

/* ---- threads; the lock is held in what follows, but for the read itself ---- */

/* The next read there is, or NULL; tells which slice of the fill it is and whether it is a guess. */
static struct fill *take(struct pool *p, int *slice, int *guessed) {
    struct queue *q = p->urgent.first ? &p->urgent : &p->idle;
    *guessed = q == &p->idle;
    if (!q->first || (*guessed && (p->urgent_open || p->idle_running >= p->idle_limit))) {
        return NULL;
    }
    struct fill *f = q->first;
    *slice = f->begun++;
    if (f->begun == f->count) {
        take_out(q, f);
    }
    p->idle_running += *guessed;
    if (p->reading++ == 0) {
        p->busy_since = now_s();
    }
    return f;
}

/* Books a read's end; `r` is what it did. */
static void end_read(struct pool *p, struct fill *f, int slice, int guessed, int64_t error, const struct result *r) {
    int ended = 1;
    f->result.asked += r->asked;
    f->result.advised += r->advised;
    if (error && !f->result.error) {
        f->result.error = error;
        f->result.failed_slice = slice;
        f->result.done = r->done;
        if (f->begun < f->count) {
            ended += f->count - f->begun;
            take_out(f->urgent ? &p->urgent : &p->idle, f);
            p->urgent_open -= f->urgent ? f->count - f->begun : 0;
            f->begun = f->count;
        }
    }
    if (--p->reading == 0) {
        p->busy_s += now_s() - p->busy_since;
    }
    p->idle_running -= guessed;
    p->urgent_open -= !guessed;
    f->ended += ended;
    if (f->ended == f->count) {
        append(&p->finished, f);
        pthread_cond_signal(&p->finished_one);
    }
    if (!guessed && p->urgent_open == 0 && p->idle.first) {
        pthread_cond_broadcast(&p->work); /* guesses may begin */
    }
}

static void *work(void *argument) {
    struct pool *p = argument;
    struct bounce bounce = {NULL, 0};
    pthread_mutex_lock(&p->lock);
    while (!p->closing) {
        int slice, guessed;
        struct fill *f = take(p, &slice, &guessed);
        if (!f) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        struct result r = {0};
        pthread_mutex_unlock(&p->lock);
        const struct slice *s = &f->slices[slice];
        const int64_t error = read_slice(&p->source, f->result.id, s, f->slot + s->region, &bounce, &r);
        pthread_mutex_lock(&p->lock);
        end_read(p, f, slice, guessed, error, &r);
    }
    free(bounce.memory);
    p->alive--;
    pthread_cond_signal(&p->thread_ended);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* ---- what the forward calls ---- */

/* Ends the threads; returns how many did not end within `seconds`. With 0 the pool is gone, else it must be left alone. */
EXPORT int64_t reads_close(struct pool *p, double seconds) {
    const struct timespec until = deadline_in(seconds);
    pthread_mutex_lock(&p->lock);
    p->closing = 1;
    pthread_cond_broadcast(&p->work);
    int waited = 0;
    while (p->alive && !waited) {
        waited = pthread_cond_timedwait(&p->thread_ended, &p->lock, &until);
    }
    const int alive = p->alive;
    pthread_mutex_unlock(&p->lock);
    if (!alive) {
        /* A fill is in one queue at most; a begun one whose reads never ended is in none, and then threads are alive. */
        free_all(&p->urgent);
        free_all(&p->idle);
        free_all(&p->finished);
        pthread_cond_destroy(&p->work);
        pthread_cond_destroy(&p->finished_one);
        pthread_cond_destroy(&p->thread_ended);
        pthread_mutex_destroy(&p->lock);
        free(p);
    }
    return alive;
}

/* Starts `threads` readers; the source's arrays must outlive them. NULL where that fails. */
EXPORT struct pool *reads_open(const struct source *source, int64_t threads) {
    struct pool *p = calloc(1, sizeof *p);
    if (!p) {
        return NULL;
    }
    p->source = *source;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->finished_one, NULL);
    pthread_cond_init(&p->thread_ended, NULL);
    clear(&p->urgent);
    clear(&p->idle);
    clear(&p->finished);
    p->idle_limit = threads > 1 ? (int)threads / 2 : 1; /* so that demand finds free threads */
    for (int64_t i = 0; i < threads; i++) {
        pthread_t thread;
        pthread_mutex_lock(&p->lock);
        const int failed = pthread_create(&thread, NULL, work, p);
        p->alive += !failed;
        pthread_mutex_unlock(&p->lock);
        if (failed) {
            reads_close(p, 5.0);
            return NULL;
        }
        pthread_detach(thread);
    }
    return p;
}

/* Queues all reads of a fill into the slot's buffer. Returns 0 or an errno. */
EXPORT int64_t reads_submit(struct pool *p, int64_t id, int64_t urgent, const struct slice *slices, int64_t count, char *slot) {
    struct fill *f = calloc(1, sizeof *f + (size_t)count * sizeof *slices);
    if (!f) {
        return ENOMEM;
    }
    f->result.id = id;
    f->slot = slot;
    f->urgent = urgent != 0;
    f->count = (int)count;
    memcpy(f->slices, slices, (size_t)count * sizeof *slices);
    pthread_mutex_lock(&p->lock);
    append(urgent ? &p->urgent : &p->idle, f);
    p->urgent_open += urgent ? f->count : 0;
    for (int64_t i = 0; i < count; i++) {
        pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
    return 0;
}

/* A layer waits for a guess: its reads that have not begun go to the urgent ones. */
EXPORT void reads_promote(struct pool *p, int64_t id) {
    pthread_mutex_lock(&p->lock);
    struct fill *f = find(&p->idle, id);
    if (f) {
        take_out(&p->idle, f);
        f->urgent = 1;
        append(&p->urgent, f);
        p->urgent_open += f->count - f->begun;
        pthread_cond_broadcast(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Takes a guess back if none of its reads has begun; returns whether. */
EXPORT int64_t reads_cancel(struct pool *p, int64_t id) {
    pthread_mutex_lock(&p->lock);
    struct fill *f = find(&p->idle, id);
    const int cancelled = f && f->begun == 0;
    if (cancelled) {
        take_out(&p->idle, f);
        free(f);
    }
    pthread_mutex_unlock(&p->lock);
    return cancelled;
}

/* Waits up to `seconds` for a fill to end; copies at most `most` results and returns how many. */
EXPORT int64_t reads_collect(struct pool *p, double seconds, struct result *results, int64_t most) {
    int64_t count = 0;
    pthread_mutex_lock(&p->lock);
    if (!p->finished.first && seconds > 0) {
        const struct timespec until = deadline_in(seconds);
        while (!p->finished.first && !pthread_cond_timedwait(&p->finished_one, &p->lock, &until)) {
        }
    }
    while (p->finished.first && count < most) {
        struct fill *f = p->finished.first;
        results[count++] = f->result;
        take_out(&p->finished, f);
        free(f);
    }
    pthread_mutex_unlock(&p->lock);
    return count;
}

/* Seconds so far with at least one read under way. */
EXPORT double reads_busy_s(struct pool *p) {
    pthread_mutex_lock(&p->lock);
    const double busy = p->busy_s + (p->reading ? now_s() - p->busy_since : 0.0);
    pthread_mutex_unlock(&p->lock);
    return busy;
}

/* Reads queued or under way. */
EXPORT int64_t reads_pending(struct pool *p) {
    pthread_mutex_lock(&p->lock);
    int64_t pending = p->reading;
    for (const struct queue *q = &p->urgent; q; q = q == &p->urgent ? &p->idle : NULL) {
        for (const struct fill *f = q->first; f; f = f->next) {
            pending += f->count - f->begun;
        }
    }
    pthread_mutex_unlock(&p->lock);
    return pending;
}
