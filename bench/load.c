// Load generator with many API keys: request i carries key i mod K, so that no single key, principal or counter stays
// hot. Buffered answers only (streams are measured with the generator of BENCH_DIR, one key is enough there).
//
//   load -p PORT -k KEYS -b BODY [-c CONNECTIONS] [-d SECONDS] [-w WARM_SECONDS] [-u PATH]
//
// KEYS: a file of one key a line. BODY: a file with the JSON body. Closed loop: every connection sends its next request
// when its answer is complete. Prints one JSON line: requests by status, requests per second, latency in microseconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_MAX = 8192, REQUEST_MAX = 1 << 20, SAMPLES_MAX = 1 << 22, DRAIN_S = 5 };

typedef struct {
    int fd, busy, waits_to_write;
    int64_t sent_at_ns;
    char *request;
    size_t length, written;
    char header[HEADER_MAX + 1];
    size_t header_length;
    int status, in_body;
    int64_t body_left;
} Connection;

static int port = 8080, connections = 64, epoll_fd;
static double seconds = 5, warm_s = 1;
static const char *path = "/v1/chat/completions";
static char **keys, *body;
static size_t key_count, next_key, body_length;
static uint64_t by_status[600], counted, failed, answered;
static uint32_t *samples_us;
static size_t sample_count;
static int64_t measure_from_ns, measure_to_ns;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static char *read_file(const char *name, size_t *length) {
    FILE *file = fopen(name, "rb");
    if (!file) die(name);
    char *data = calloc(1, REQUEST_MAX);
    *length = fread(data, 1, REQUEST_MAX - 1, file);
    fclose(file);
    return data;
}

static void load_keys(const char *name) {
    size_t length, room = 16384;
    char *data = read_file(name, &length);
    keys = malloc(room * sizeof *keys);
    for (char *line = strtok(data, "\n"); line; line = strtok(NULL, "\n")) {
        if (key_count == room) keys = realloc(keys, (room *= 2) * sizeof *keys);
        keys[key_count++] = line;
    }
    if (!key_count) { fprintf(stderr, "%s holds no key\n", name); exit(1); }
}

static void watch(Connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll_fd, operation, c->fd, &event)) die("epoll_ctl");
}

static void dial(Connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&address, sizeof address)) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
    c->waits_to_write = 0;
}

static void push(Connection *c) {
    while (c->written < c->length) {
        ssize_t n = send(c->fd, c->request + c->written, c->length - c->written, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            if (!c->waits_to_write) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            c->waits_to_write = 1;
            return;
        }
        if (n < 0) return; // the read side reports what happened
        c->written += n;
    }
    if (c->waits_to_write) watch(c, EPOLL_CTL_MOD, EPOLLIN);
    c->waits_to_write = 0;
}

static void ask(Connection *c) {
    int head = snprintf(c->request, HEADER_MAX,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
        "Accept: */*\r\nUser-Agent: load\r\nContent-Length: %zu\r\n\r\n",
        path, port, keys[next_key], body_length);
    next_key = (next_key + 1) % key_count;
    memcpy(c->request + head, body, body_length);
    c->length = head + body_length;
    c->written = c->header_length = 0;
    c->in_body = 0;
    c->busy = 1;
    c->sent_at_ns = now_ns();
    push(c);
}

static void finish(Connection *c, int complete) {
    int64_t at = now_ns();
    c->busy = 0;
    answered += complete && c->status == 200;
    if (c->sent_at_ns >= measure_from_ns && at < measure_to_ns) {
        by_status[complete && c->status > 0 && c->status < 600 ? c->status : 0]++;
        if (complete && c->status == 200) {
            counted++;
            if (sample_count < SAMPLES_MAX) samples_us[sample_count++] = (at - c->sent_at_ns) / 1000;
        } else failed++;
    }
    if (!complete) { close(c->fd); dial(c); }
    if (at < measure_to_ns) ask(c);
}

// Take `n` received bytes. Answers carry Content-Length; anything else ends the program, because a wrong count is worse.
static void take(Connection *c, const char *data, size_t n) {
    while (n > 0 && c->busy) {
        if (!c->in_body) {
            size_t room = HEADER_MAX - c->header_length, part = n < room ? n : room, before = c->header_length;
            memcpy(c->header + before, data, part);
            c->header[c->header_length += part] = 0;
            char *end = strstr(c->header, "\r\n\r\n");
            if (!end) {
                if (c->header_length == HEADER_MAX) { fprintf(stderr, "header too long\n"); exit(1); }
                return;
            }
            size_t used = end + 4 - c->header - before;
            data += used;
            n -= used;
            end[2] = 0;
            c->status = atoi(c->header + 9);
            char *length = strcasestr(c->header, "\r\ncontent-length:");
            if (!length) { fprintf(stderr, "answer without Content-Length: %s\n", c->header); exit(1); }
            c->body_left = atoll(length + 17);
            c->in_body = 1;
        }
        int64_t part = (int64_t)n < c->body_left ? (int64_t)n : c->body_left;
        c->body_left -= part;
        data += part;
        n -= part;
        if (!c->body_left) finish(c, 1);
    }
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t percentile(double p) { return sample_count ? samples_us[(size_t)(p * (sample_count - 1))] : 0; }

static void report(void) {
    qsort(samples_us, sample_count, sizeof *samples_us, ascending);
    printf("{\"ok\":%lu,\"err\":%lu,\"total_ok\":%lu,\"rps\":%.1f,\"keys\":%zu,\"lat_us\":{\"p50\":%u,\"p99\":%u},\"status\":{", counted, failed, answered,
           counted / seconds, key_count, percentile(.5), percentile(.99));
    for (int i = 0, first = 1; i < 600; i++)
        if (by_status[i]) { printf("%s\"%d\":%lu", first ? "" : ",", i, by_status[i]); first = 0; }
    printf("}}\n");
}

int main(int count, char **arguments) {
    static char buffer[1 << 18];
    int option;
    while ((option = getopt(count, arguments, "p:k:b:c:d:w:u:")) != -1) switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'k': load_keys(optarg); break;
        case 'b': body = read_file(optarg, &body_length); break;
        case 'c': connections = atoi(optarg); break;
        case 'd': seconds = atof(optarg); break;
        case 'w': warm_s = atof(optarg); break;
        case 'u': path = optarg; break;
        default: return 2;
    }
    if (!keys || !body) { fprintf(stderr, "-k and -b are needed\n"); return 2; }
    samples_us = malloc(SAMPLES_MAX * sizeof *samples_us);
    epoll_fd = epoll_create1(0);
    Connection *all = calloc(connections, sizeof *all);
    measure_from_ns = now_ns() + (int64_t)(warm_s * 1e9);
    measure_to_ns = measure_from_ns + (int64_t)(seconds * 1e9);
    for (int i = 0; i < connections; i++) {
        all[i].request = malloc(HEADER_MAX + body_length);
        dial(&all[i]);
        ask(&all[i]);
    }
    for (int64_t end = measure_to_ns + DRAIN_S * 1000000000LL; now_ns() < end;) {
        struct epoll_event events[512];
        int ready = epoll_wait(epoll_fd, events, 512, 100), busy = 0;
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) push(c);
            if (!(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
            ssize_t n = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
            if (n > 0) take(c, buffer, n);
            else if (n == 0 || errno != EAGAIN) finish(c, 0);
        }
        if (now_ns() < measure_to_ns) continue;
        for (int i = 0; i < connections; i++) busy += all[i].busy;
        if (!busy) break;
    }
    report();
    return 0;
}
