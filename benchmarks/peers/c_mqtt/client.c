/* A publisher and a subscriber on libmosquitto, in one thread each: what a C client makes of the same job.
 *
 * It talks as benchmarks/peers/job.py says. The functions it uses are declared here, as in mosquitto.h of 1.6 and 2.0, so
 * that the library alone is enough; their interface has been the same since the library's soname became 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct mosquitto;
struct mosquitto_message {
    int mid;
    char *topic;
    void *payload;
    int payloadlen;
    int qos;
    bool retain;
};
enum { OPT_PROTOCOL_VERSION = 1, OPT_RECEIVE_MAXIMUM = 4, OPT_SEND_MAXIMUM = 5, OPT_TCP_NODELAY = 11 };

extern int mosquitto_lib_init(void);
extern int mosquitto_lib_version(int *major, int *minor, int *revision);
extern struct mosquitto *mosquitto_new(const char *id, bool clean_session, void *user);
extern int mosquitto_int_option(struct mosquitto *, int option, int value);
extern int mosquitto_connect(struct mosquitto *, const char *host, int port, int keepalive);
extern int mosquitto_disconnect(struct mosquitto *);
extern int mosquitto_publish(struct mosquitto *, int *mid, const char *topic, int length, const void *payload, int qos,
                             bool retain);
extern int mosquitto_subscribe(struct mosquitto *, int *mid, const char *pattern, int qos);
extern int mosquitto_loop(struct mosquitto *, int timeout, int max_packets);
extern void mosquitto_connect_callback_set(struct mosquitto *, void (*)(struct mosquitto *, void *, int));
extern void mosquitto_publish_callback_set(struct mosquitto *, void (*)(struct mosquitto *, void *, int));
extern void mosquitto_subscribe_callback_set(struct mosquitto *,
                                             void (*)(struct mosquitto *, void *, int, int, const int *));
extern void mosquitto_message_callback_set(struct mosquitto *,
                                           void (*)(struct mosquitto *, void *, const struct mosquitto_message *));

#define TOPIC "benchmark/messages"
#define STAMP 8
#define PATIENCE 2.0

static const char *host = "127.0.0.1", *role, *version = "3.1.1";
static int port, size = 100, qos, window = 100;
static long count;
static double rate;

static bool connected, subscribed;
static long confirmed, received, wrong;
static double last;
static unsigned char *marks;
static int64_t *latencies;

static double cpu_before;
static long rss_before;

static void give_up(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static double now(void)
{
    return now_ns() / 1e9;
}

static double cpu(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* What /proc tells of the memory of this process, bytes. */
static long memory(const char *what)
{
    long kib = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, what, strlen(what)))
            kib = atol(line + strlen(what) + 1);
    if (status)
        fclose(status);
    return kib * 1024;
}

static void put(unsigned char *to, uint64_t value)
{
    for (int i = STAMP - 1; i >= 0; i--, value >>= 8)
        to[i] = value & 255;
}

static uint64_t get(const unsigned char *from)
{
    uint64_t value = 0;
    for (int i = 0; i < STAMP; i++)
        value = value << 8 | from[i];
    return value;
}

/* --- the conversation */

static void ready(void)
{
    cpu_before = cpu();
    rss_before = memory("VmRSS");
    puts("READY");
    fflush(stdout);
}

static bool heard(int timeout)
{
    struct pollfd in = {.fd = 0, .events = POLLIN};
    return poll(&in, 1, timeout) > 0;
}

static void finish(void)
{
    int major, minor, revision;
    double seconds = cpu() - cpu_before;
    mosquitto_lib_version(&major, &minor, &revision);
    printf("\"role\": \"%s\", \"cpu_seconds\": %.6f, \"rss_ready\": %ld, \"rss_peak\": %ld, "
           "\"libraries\": {\"libmosquitto\": \"%d.%d.%d\"}}\n",
           role, seconds, rss_before, memory("VmHWM"), major, minor, revision);
    fflush(stdout);
}

/* --- callbacks */

static void on_connect(struct mosquitto *m, void *user, int code)
{
    (void)m, (void)user;
    if (code)
        give_up("connection refused");
    connected = true;
}

static void on_publish(struct mosquitto *m, void *user, int mid)
{
    (void)m, (void)user, (void)mid;
    confirmed++;
}

static void on_subscribe(struct mosquitto *m, void *user, int mid, int n, const int *granted)
{
    (void)m, (void)user, (void)mid, (void)n, (void)granted;
    subscribed = true;
}

static void on_message(struct mosquitto *m, void *user, const struct mosquitto_message *message)
{
    (void)m, (void)user;
    if (message->payloadlen != size) {
        wrong++;
    } else if (rate > 0) {
        if (received < count)
            latencies[received] = now_ns() - (int64_t)get(message->payload);
    } else {
        uint64_t number = get(message->payload);
        if (number < (uint64_t)count)
            marks[number] = 1;
        else
            wrong++;
    }
    received++;
    if (!(received & 127) || received == count)
        last = now();
}

/* --- roles */

static void turn(struct mosquitto *m, int timeout)
{
    if (mosquitto_loop(m, timeout, 1))
        give_up("connection lost");
}

static void publish(struct mosquitto *m)
{
    unsigned char *payload = malloc(size);
    char go[8];
    memset(payload, 'x', size);
    ready();
    if (!fgets(go, sizeof go, stdin) || strncmp(go, "GO", 2))
        give_up("given up");
    double start = now();
    int64_t woken = now_ns();
    for (long number = 0; number < count; number++) {
        uint64_t stamp = number;
        if (rate > 0) {
            int64_t due = (int64_t)((start + number / rate) * 1e9);
            for (int64_t left; (left = due - now_ns()) > 0; woken = now_ns()) {
                turn(m, left > 1000000 ? left / 1000000 : 0);
                if (left < 1000000) {
                    struct timespec pause = {.tv_nsec = left};
                    nanosleep(&pause, NULL);
                }
            }
            stamp = due > woken ? due : woken;
        }
        put(payload, stamp);
        if (number - confirmed >= window)
            /* fill it again when half is free: the broker reads many packets at once rather than one */
            while (number - confirmed > window / 2)
                turn(m, 1000);
        if (mosquitto_publish(m, NULL, TOPIC, size, payload, qos, false))
            give_up("publish failed");
    }
    while (confirmed < count)
        turn(m, 1000);
    printf("{\"start\": %.9f, \"end\": %.9f, ", start, now());
    finish();
}

static int ascending(const void *one, const void *other)
{
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

static void subscribe(struct mosquitto *m)
{
    marks = calloc(count, 1);
    latencies = calloc(count, sizeof *latencies);
    mosquitto_subscribe(m, NULL, TOPIC, qos);
    while (!subscribed)
        turn(m, 1000);
    ready();
    bool published = false;
    double progress = now();
    while (received < count) {
        long before = received;
        turn(m, 100);
        if (received != before) {
            progress = 0;
            continue;
        }
        char word[16];
        if (!published && heard(0)) {
            if (!fgets(word, sizeof word, stdin))
                give_up("given up");
            published = true;
        }
        if (!progress)
            progress = now();
        if (published && now() - progress > PATIENCE)
            break;
    }
    long different = 0;
    for (long i = 0; i < count; i++)
        different += marks[i];
    printf("{\"start\": 0.0, \"end\": %.9f, \"received\": %ld, \"wrong\": %ld, ", last, received, wrong);
    if (rate > 0) {
        long n = received < count ? received : count;
        qsort(latencies, n, sizeof *latencies, ascending);
        printf("\"lost\": %ld, ", count - received);
        for (int percent = 50; n && percent <= 99; percent += 49)
            printf("\"p%d\": %.3f, ", percent, latencies[(percent * n + 99) / 100 - 1] / 1e3);
    } else {
        printf("\"lost\": %ld, \"duplicates\": %ld, ", count - different, received - wrong - different);
    }
    finish();
}

int main(int argc, char **argv)
{
    role = argc > 1 ? argv[1] : "";
    for (int i = 2; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--host"))
            host = value;
        else if (!strcmp(name, "--port"))
            port = atoi(value);
        else if (!strcmp(name, "--count"))
            count = atol(value);
        else if (!strcmp(name, "--size"))
            size = atoi(value);
        else if (!strcmp(name, "--qos"))
            qos = atoi(value);
        else if (!strcmp(name, "--version"))
            version = value;
        else if (!strcmp(name, "--window"))
            window = atoi(value);
        else if (!strcmp(name, "--rate"))
            rate = atof(value);
    }
    if (count < 1 || size < STAMP)
        give_up("--count and --size (of at least 8) are needed");
    mosquitto_lib_init();
    struct mosquitto *m = mosquitto_new(NULL, true, NULL);
    if (!m)
        give_up("out of memory");
    mosquitto_int_option(m, OPT_PROTOCOL_VERSION, !strcmp(version, "5") ? 5 : 4);
    /* it hangs up on a broker that sends more, which mosquitto does now and then, whatever it was told */
    mosquitto_int_option(m, OPT_RECEIVE_MAXIMUM, 65535);
    mosquitto_int_option(m, OPT_SEND_MAXIMUM, window);
    mosquitto_int_option(m, OPT_TCP_NODELAY, 1);
    mosquitto_connect_callback_set(m, on_connect);
    mosquitto_publish_callback_set(m, on_publish);
    mosquitto_subscribe_callback_set(m, on_subscribe);
    mosquitto_message_callback_set(m, on_message);
    if (mosquitto_connect(m, host, port, 60))
        give_up(strerror(errno));
    while (!connected)
        turn(m, 1000);
    if (!strcmp(role, "publish"))
        publish(m);
    else if (!strcmp(role, "subscribe"))
        subscribe(m);
    else
        give_up("the first argument is publish or subscribe");
    mosquitto_disconnect(m);
    return 0;
}
