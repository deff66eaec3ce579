/* What the ranks of a measurement in C have in common: orders come over a UNIX socket, one a line,
 * and a rank that waits for one sleeps. No peer's idle ranks take time from those that are measured.
 *
 *     TYPE BYTES KIND COUNT CHECK     to which a rank answers    ok SECONDS    or    no REASON
 */
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
    char type[16];
    size_t bytes;
    char kind[16]; /* of memory: private or registered */
    long count;    /* calls, one after the other */
    int check;     /* the memory is all ones before, and must be the number of ranks afterwards */
};

static void die(const char *what)
{
    perror(what);
    exit(EXIT_FAILURE);
}

static FILE *orders(const char *path, const char *crew, int rank)
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
    fprintf(file, "%s %d\n", crew, rank);
    return file;
}

static int next(FILE *file, struct order *order)
{
    char text[256];

    if (!fgets(text, sizeof text, file))
        return 0;
    return sscanf(text, "%15s %zu %15s %ld %d", order->type, &order->bytes, order->kind,
                  &order->count, &order->check) == 5;
}

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* A small whole number of this type, as bits; 0 for a type that nobody here knows. */
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

static void fill(void *memory, const struct order *order)
{
    size_t item_bytes;
    uint32_t bits = pattern(order->type, 1, &item_bytes);

    if (!order->check) {
        memset(memory, 0, order->bytes);
        return;
    }
    for (size_t at = 0; at < order->bytes; at += item_bytes)
        memcpy((char *)memory + at, &bits, item_bytes);
}

static int right(const void *memory, const struct order *order, unsigned ranks)
{
    size_t item_bytes;
    uint32_t bits = pattern(order->type, ranks, &item_bytes);

    for (size_t at = 0; at < order->bytes; at += item_bytes)
        if (memcmp((const char *)memory + at, &bits, item_bytes))
            return 0;
    return 1;
}

#endif
