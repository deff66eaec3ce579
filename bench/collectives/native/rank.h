/* What the ranks of a measurement in C have in common: orders come over a UNIX socket, one per line,
 * and a rank that waits for one sleeps. No peer's idle ranks take time from those that are measured.
 *
 *     CALL TYPE BYTES KIND COUNT CHECK     to which a rank answers    ok SECONDS    or    no REASON
 *
 * CALL is allreduce, allgather, reduce_scatter, alltoall, broadcast, reduce, gather or scatter (root 0),
 * barrier or p2p (a round trip between ranks 2i and 2i + 1). BYTES are those of the larger buffer. */
#ifndef BENCH_RANK_H
#define BENCH_RANK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

struct order {
    char call[16];
    char type[16];
    size_t bytes;
    char kind[16]; /* of memory: private or registered */
    long count;    /* calls, one after the other */
    int check;     /* the input has known values, and the output is compared with what they give */
};

static void die(const char *what)
{
    perror(what);
    exit(EXIT_FAILURE);
}

static FILE *orders(const char *path, const char *group, int rank)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int line = socket(AF_UNIX, SOCK_STREAM, 0);
    FILE *file;

    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (line < 0 || connect(line, (struct sockaddr *)&address, sizeof address))
        die(path);
    file = fdopen(line, "r+");
    if (!file)
        die("fdopen");
    setvbuf(file, NULL, _IONBF, 0);
    fprintf(file, "%s %d\n", group, rank);
    return file;
}

static int next(FILE *file, struct order *order)
{
    char text[256];

    if (!fgets(text, sizeof text, file))
        return 0;
    return sscanf(text, "%15s %15s %zu %15s %ld %d", order->call, order->type, &order->bytes,
                  order->kind, &order->count, &order->check) == 6;
}

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* A small whole number of this type, as bits; 0 for an unknown type. */
static uint32_t pattern(const char *type, unsigned value, size_t *item_bytes)
{
    float number = (float)value;
    uint32_t bits;
    int exponent = 0;

    memcpy(&bits, &number, sizeof bits);
    *item_bytes = 2;
    if (!strcmp(type, "float32")) {
        *item_bytes = 4;
        return bits;
    }
    if (!strcmp(type, "bfloat16"))
        return bits >> 16;
    if (strcmp(type, "float16"))
        return 0;
    while ((value >> (exponent + 1)) != 0)
        exponent++;
    return ((unsigned)(exponent + 15) << 10) | ((value - (1u << exponent)) << (10 - exponent));
}

static int is(const struct order *order, const char *call)
{
    return !strcmp(order->call, call);
}

static int known(const struct order *order)
{
    return is(order, "allreduce") || is(order, "broadcast") || is(order, "allgather")
           || is(order, "reduce_scatter") || is(order, "alltoall") || is(order, "reduce")
           || is(order, "gather") || is(order, "scatter") || is(order, "barrier")
           || is(order, "p2p");
}

static int in_place(const struct order *order)
{
    return is(order, "allreduce") || is(order, "broadcast") || is(order, "reduce")
           || is(order, "barrier");
}

static size_t input_bytes(const struct order *order, unsigned ranks)
{
    return is(order, "allgather") || is(order, "gather") ? order->bytes / ranks : order->bytes;
}

static size_t output_bytes(const struct order *order, unsigned rank, unsigned ranks)
{
    if (is(order, "barrier") || (is(order, "gather") && rank))
        return 0;
    return is(order, "reduce_scatter") || is(order, "scatter") ? order->bytes / ranks : order->bytes;
}

static unsigned input_value(const struct order *order, unsigned rank, unsigned ranks, unsigned block)
{
    if (is(order, "allreduce") || is(order, "reduce"))
        return 1;
    if (is(order, "broadcast"))
        return rank ? 1 : ranks + 1;
    if (is(order, "reduce_scatter") || is(order, "scatter"))
        return block + 1;
    return rank + 1 + (is(order, "alltoall") ? block : 0);
}

static unsigned output_value(const struct order *order, unsigned rank, unsigned ranks,
                             unsigned block)
{
    if (is(order, "allreduce"))
        return ranks;
    if (is(order, "reduce"))
        return rank ? 1 : ranks; /* what is not the root's stays */
    if (is(order, "scatter"))
        return rank + 1;
    if (is(order, "broadcast"))
        return ranks + 1;
    if (is(order, "reduce_scatter"))
        return ranks * (rank + 1);
    if (is(order, "p2p"))
        return (rank & ~1u) + 1;
    return block + 1 + (is(order, "alltoall") ? rank : 0);
}

/* The value of each of `ranks` blocks is known: zeros where nothing is checked. */
static void fill(void *memory, const struct order *order, unsigned rank, unsigned ranks)
{
    size_t bytes = input_bytes(order, ranks), item_bytes;

    if (!order->check) {
        memset(memory, 0, bytes);
        return;
    }
    pattern(order->type, 1, &item_bytes);
    for (size_t at = 0, items = bytes / item_bytes; at < items; at++) {
        unsigned value = input_value(order, rank, ranks, (unsigned)(at * ranks / items));
        uint32_t bits = pattern(order->type, value, &item_bytes);

        memcpy((char *)memory + at * item_bytes, &bits, item_bytes);
    }
}

static int right(const void *memory, const struct order *order, unsigned rank, unsigned ranks)
{
    size_t bytes = output_bytes(order, rank, ranks), item_bytes;

    pattern(order->type, 1, &item_bytes);
    for (size_t at = 0, items = bytes / item_bytes; at < items; at++) {
        unsigned value = output_value(order, rank, ranks, (unsigned)(at * ranks / items));
        uint32_t bits = pattern(order->type, value, &item_bytes);

        if (memcmp((const char *)memory + at * item_bytes, &bits, item_bytes))
            return 0;
    }
    return 1;
}

#endif
