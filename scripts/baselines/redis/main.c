/* A client of Redis for scripts/bench and scripts/bench-net: SET and GET of one large value, through hiredis.
 *
 *   redis (--unix PATH | --port PORT) --key NAME --bytes COUNT --way (plain | direct) [--socket-buffer BYTES]
 *
 * `plain` is redisCommandArgv, which copies a value into its output buffer, and replies into an object. `direct` copies
 * nothing: it sends the value from where it lies, with the command around it, and receives a value to where it is wanted.
 * hiredis has the connection in both.
 *
 * Lines on standard input ask for rounds, as those of scripts/baselines/src/rounds.rs do, and each is answered with a line of
 * JSON: `round set`, `round get`, `round setget`, `check ROUNDS` (the value that was got last is the one that was set last).
 */

#include <hiredis/hiredis.h>

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

struct client {
    redisContext *context;
    const char *key;
    bool direct;
    size_t bytes;
    char *value, *got;
    unsigned rounds;
};

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("redis: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Memory that was touched before, on huge pages where there are any. */
static char *memory(size_t bytes) {
    char *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        die("mmap: %s", strerror(errno));
    madvise(found, bytes, MADV_HUGEPAGE);
    memset(found, 1, bytes);
    return found;
}

static redisReply *reply_of(struct client *client) {
    void *reply = NULL;
    if (redisGetReply(client->context, &reply) != REDIS_OK)
        die("%s", client->context->errstr);
    return reply;
}

static void expect_ok(redisReply *reply) {
    if (!reply || reply->type != REDIS_REPLY_STATUS)
        die("SET was answered with %s", reply && reply->str ? reply->str : "nothing");
    freeReplyObject(reply);
}

static void send_all(int socket, struct iovec *parts, size_t count) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    while (message.msg_iovlen > 0) {
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
        if (sent < 0)
            die("sendmsg: %s", strerror(errno));
        for (size_t left = (size_t)sent; left > 0 || (message.msg_iovlen > 0 && message.msg_iov->iov_len == 0);) {
            size_t of_part = left < message.msg_iov->iov_len ? left : message.msg_iov->iov_len;
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + of_part;
            message.msg_iov->iov_len -= of_part;
            left -= of_part;
            if (message.msg_iov->iov_len == 0) {
                message.msg_iov++;
                message.msg_iovlen--;
            }
        }
    }
}

static void receive_all(int socket, char *to, size_t bytes) {
    while (bytes > 0) {
        ssize_t count = recv(socket, to, bytes, MSG_WAITALL);
        if (count <= 0)
            die("recv: %s", count < 0 ? strerror(errno) : "the server has closed the connection");
        to += count;
        bytes -= (size_t)count;
    }
}

static void set(struct client *client) {
    if (!client->direct) {
        const char *words[] = {"SET", client->key, client->value};
        const size_t lengths[] = {3, strlen(client->key), client->bytes};
        expect_ok(redisCommandArgv(client->context, 3, words, lengths));
        return;
    }
    char head[96], tail[] = "\r\n";
    int length = snprintf(head, sizeof head, "*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n", strlen(client->key), client->key, client->bytes);
    struct iovec parts[] = {{head, (size_t)length}, {client->value, client->bytes}, {tail, 2}};
    send_all(client->context->fd, parts, 3);
    expect_ok(reply_of(client));
}

static void get(struct client *client) {
    if (!client->direct) {
        redisReply *reply = redisCommand(client->context, "GET %s", client->key);
        if (!reply || reply->type != REDIS_REPLY_STRING || reply->len != client->bytes)
            die("GET was answered with another value");
        /* The reply is the program's own buffer. */
        client->got[0] = reply->str[0];
        client->got[client->bytes - 1] = reply->str[client->bytes - 1];
        freeReplyObject(reply);
        return;
    }
    char words[64], head[32], came[32], tail[2];
    int length = snprintf(words, sizeof words, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n", strlen(client->key), client->key);
    struct iovec part = {words, (size_t)length};
    send_all(client->context->fd, &part, 1);
    size_t expected = (size_t)snprintf(head, sizeof head, "$%zu\r\n", client->bytes);
    receive_all(client->context->fd, came, expected);
    if (memcmp(head, came, expected) != 0)
        die("GET was answered with another value");
    receive_all(client->context->fd, client->got, client->bytes);
    receive_all(client->context->fd, tail, 2);
}

static void do_round(struct client *client, const char *what) {
    double cpu = cpu_seconds(), start = now();
    bool sets = strncmp(what, "set", 3) == 0, gets = strcmp(what, "get") == 0 || strcmp(what, "setget") == 0;
    if (!sets && !gets)
        die("unknown round %s", what);
    if (sets)
        set(client);
    if (gets)
        get(client);
    double end = now();
    printf("{\"what\": \"%s\", \"bytes\": %zu, \"start\": %.9f, \"end\": %.9f, \"seconds\": %.9f, \"cpu_seconds\": %.6f}\n",
           what, client->bytes * (sets && gets ? 2 : 1), start, end, end - start, cpu_seconds() - cpu);
    if (sets)
        /* The next value is another one. */
        memset(client->value, (int)(++client->rounds % 100 + 1), 64);
}

static void check(struct client *client) {
    client->got[0] = client->got[client->bytes - 1] = 0;
    get(client);
    if (client->got[0] != (char)(client->rounds ? (client->rounds - 1) % 100 + 1 : 1) || client->got[client->bytes - 1] != 1)
        die("the value is not the one that was set");
    puts("{\"what\": \"check\"}");
}

int main(int count, char **words) {
    struct client client = {0};
    const char *path = NULL;
    int port = 0, buffer = 0;
    for (int at = 1; at + 1 < count; at += 2) {
        if (strcmp(words[at], "--unix") == 0)
            path = words[at + 1];
        else if (strcmp(words[at], "--port") == 0)
            port = atoi(words[at + 1]);
        else if (strcmp(words[at], "--key") == 0)
            client.key = words[at + 1];
        else if (strcmp(words[at], "--socket-buffer") == 0)
            buffer = atoi(words[at + 1]);
        else if (strcmp(words[at], "--bytes") == 0)
            client.bytes = strtoul(words[at + 1], NULL, 10);
        else if (strcmp(words[at], "--way") == 0)
            client.direct = strcmp(words[at + 1], "direct") == 0;
        else
            die("unknown option %s", words[at]);
    }
    if (client.bytes < 128 || !client.key || strlen(client.key) > 16 || (!path && !port))
        die("needs --key (of up to 16 bytes), --bytes, and --unix or --port");
    client.context = path ? redisConnectUnix(path) : redisConnect("127.0.0.1", port);
    if (!client.context || client.context->err)
        die("connecting: %s", client.context ? client.context->errstr : "no memory");
    if (buffer > 0) {
        setsockopt(client.context->fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(client.context->fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    }
    client.value = memory(client.bytes);
    client.got = memory(client.bytes);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("{\"what\": \"ready\"}");
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "round ", 6) == 0)
            do_round(&client, line + 6);
        else if (strncmp(line, "check ", 6) == 0)
            check(&client);
        else
            die("unknown request %s", line);
    }
    redisFree(client.context);
    return 0;
}
