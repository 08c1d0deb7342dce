/*
 * What scripts/bench aio measures of the C library. Each line of stdin is a task, and its answer seconds, a line:
 *
 *     read FILE DEPTH BYTES      the whole of a file by requests of so many bytes, so many under way
 *     write FILE DEPTH BYTES     one contribution of the whole file and its commit, likewise
 *     push                       one contribution to the model of the URL, written at once
 *     pull                       the version with it, copied into memory of the program
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "modelio.h"

#define PATIENCE 120000
#define MOST 64

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}

static int64_t check(int64_t answer, const char *what)
{
	if (answer < 0) {
		fprintf(stderr, "%s: %s\n", what, modelio_error());
		exit(1);
	}
	return answer;
}

static void *pages(size_t size)
{
	void *memory;
	if (posix_memalign(&memory, 1 << 21, size))
		exit(1);
	/* 2^-7 as fp32, as fio writes it. */
	for (size_t at = 0; at < size / 4; at++)
		((uint32_t *)memory)[at] = 0x3c000000;
	return memory;
}

/* The whole of a file, with `depth` requests of `size` bytes under way. */
static double move(const char *path, int writes, uint32_t depth, size_t size)
{
	struct modelio_queue_options options = { .depth = depth, .piece = size };
	struct modelio_request requests[MOST];
	struct modelio_completion ended[MOST];
	modelio_handle queue;
	struct stat stat;
	char *memory = pages(depth * size);
	check(modelio_queue(&options, &queue), "queue");
	check(modelio_register(queue, memory, depth * size), "register");
	double begun = now();
	int descriptor = open(path, writes ? O_WRONLY | O_DIRECT : O_RDONLY);
	if (descriptor < 0 || fstat(descriptor, &stat)) {
		perror(path);
		exit(1);
	}
	int file = check(modelio_add_file(queue, descriptor), "add");
	size_t at = 0, flying = 0, idle = depth;
	char *free_memory[MOST];
	for (uint32_t slot = 0; slot < depth; slot++)
		free_memory[slot] = memory + slot * size;
	while (at < (size_t)stat.st_size || flying) {
		size_t batch = 0;
		for (; idle && at < (size_t)stat.st_size; at += size, batch++) {
			char *data = free_memory[--idle];
			size_t left = stat.st_size - at;
			requests[batch] = (struct modelio_request){
				.file = file, .op = writes ? MODELIO_WRITE : MODELIO_READ, .offset = at, .data = data,
				.size = left < size ? left : size, .timeout_ms = PATIENCE, .context = data };
		}
		flying += check(modelio_submit(queue, requests, batch), "submit");
		for (ssize_t found = check(modelio_wait(queue, 1, ended, MOST, PATIENCE), "wait"); found-- > 0; flying--) {
			check(ended[found].result, "a request");
			free_memory[idle++] = ended[found].context;
		}
	}
	if (writes && fsync(descriptor)) {
		perror("fsync");
		exit(1);
	}
	double seconds = now() - begun;
	close(descriptor);
	check(modelio_close(queue), "close");
	free(memory);
	return seconds;
}

int main(int count, char **arguments)
{
	modelio_handle model, learner, weights;
	struct modelio_version_info version;
	char line[4096], path[4000], *memory = NULL;
	uint32_t depth;
	size_t size;

	if (count == 2) {
		check(modelio_connect(arguments[1], NULL, &model), "connect");
		check(modelio_join(model, NULL, PATIENCE, &learner), "join");
		check(modelio_open_weights(model, PATIENCE, &weights), "weights");
		check(modelio_weights(weights, &version), "weights");
		check(modelio_close(weights), "close");
		memory = pages(version.size);
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof line, stdin)) {
		double seconds, begun = now();
		if (sscanf(line, "read %3999s %u %zu", path, &depth, &size) == 3)
			seconds = move(path, 0, depth, size);
		else if (sscanf(line, "write %3999s %u %zu", path, &depth, &size) == 3)
			seconds = move(path, 1, depth, size);
		else if (!strncmp(line, "push", 4)) {
			check(modelio_write(learner, (void *)memory, version.size, 0, PATIENCE), "write");
			check(modelio_commit(learner, PATIENCE), "commit");
			seconds = now() - begun;
		} else {
			check(modelio_open_weights(learner, PATIENCE, &weights), "weights");
			check(modelio_weights(weights, &version), "weights");
			memcpy(memory, version.data, version.size);
			check(modelio_close(weights), "close");
			seconds = now() - begun;
		}
		printf("%.9f\n", seconds);
	}
	return 0;
}
