/*
 * What the library answers to right and wrong calls. tests/test_c_library.py runs it, under AddressSanitizer, with the URL
 * of a model of `sgd` with rate 1 and of 1,048,576 bytes of zeros, and with the path of an empty file.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "modelio.h"

#undef NDEBUG
#include <assert.h>

#define PATIENCE 600000
#define SIZE (1 << 20)

static modelio_handle model, queue;
static float *ones;

static void expect(int64_t answer, int64_t wanted, const char *words)
{
	if (answer != wanted || (words && !strstr(modelio_error(), words))) {
		fprintf(stderr, "answer %lld, not %lld: %s\n", (long long)answer, (long long)wanted, modelio_error());
		abort();
	}
}

static float first_weight(modelio_handle of)
{
	modelio_handle weights;
	struct modelio_version_info info;
	expect(modelio_open_weights(of, PATIENCE, &weights), 0, NULL);
	expect(modelio_weights(weights, &info), 0, NULL);
	assert(info.size == SIZE);
	float value = *(const float *)info.data;
	expect(modelio_close(weights), 0, NULL);
	return value;
}

static void wrong_calls_are_errors_and_change_nothing(const char *url)
{
	modelio_handle none = -7, learner;
	struct modelio_options bad = { .transport = "pigeon" };
	char text[8];

	expect(modelio_connect(NULL, NULL, &none), -EINVAL, "NULL");
	expect(modelio_connect("http://x/m", NULL, &none), -EINVAL, "gradfs://HOST:PORT/MODEL");
	expect(modelio_connect("gradfs://127.0.0.1:1/m", NULL, &none), -EHOSTUNREACH, NULL);
	expect(modelio_connect(url, &bad, &none), -EINVAL, "pigeon");
	assert(none == -7);
	expect(modelio_close(12345), -EBADF, "12345");
	expect(modelio_commit(model, 10), -EBADF, "learner or publication");
	expect(modelio_submit(model, NULL, 0), -EBADF, "queue");
	expect(modelio_get(model, "nothing", text, sizeof text), -ENOENT, "nothing");
	expect(modelio_set(model, "control/learning_rate", "fast", PATIENCE), -EINVAL, "fast");
	expect(modelio_set(model, "control/no_such", "1", PATIENCE), -ENOENT, "no_such");
	expect(modelio_set(model, "control/settings.json", "{}", PATIENCE), -ENOENT, "settings.json");
	expect(modelio_set(model, "settings.json", "{\"learning_rate\": 9, \"momentum\": 2}", PATIENCE), -EINVAL, "momentum");
	expect(modelio_set(model, "version", "1", PATIENCE), -ENOENT, NULL);
	expect(modelio_publish(model, NULL), -EINVAL, "the place for the handle is NULL");
	expect(modelio_join(model, "lost", PATIENCE, NULL), -EINVAL, "the place for the handle is NULL");
	expect(modelio_open_weights(model, PATIENCE, NULL), -EINVAL, "the place for the handle is NULL");
	expect(modelio_publish(model, &none), 0, NULL);
	expect(modelio_commit(none, PATIENCE), -EINVAL, "nothing was written");
	expect(modelio_close(none), 0, NULL);
	expect(modelio_join(model, "no/name", PATIENCE, &learner), -EINVAL, "no/name");
	expect(modelio_join(model, "one", PATIENCE, &learner), 0, NULL);
	expect(modelio_join(model, "one", PATIENCE, &none), -EEXIST, "one");
	expect(modelio_commit(learner, PATIENCE), -EINVAL, "nothing was written");
	expect(modelio_write(learner, NULL, 4, 0, PATIENCE), -EINVAL, "NULL");
	expect(modelio_write(learner, (void *)ones, 4, SIZE, PATIENCE), -EFBIG, "outside");
	expect(modelio_write(learner, (void *)ones, 2, 0, PATIENCE), 0, NULL);
	expect(modelio_commit(learner, PATIENCE), -EINVAL, "middle of an element");
	assert(modelio_get(learner, "error", text, sizeof text) > (ssize_t)sizeof text);
	expect(modelio_abort(learner, PATIENCE), 0, NULL);
	expect(modelio_wait_version(model, 0, 20, NULL), -ETIMEDOUT, NULL);
	assert(first_weight(model) == 0);
	expect(modelio_close(learner), 0, NULL);
	expect(modelio_close(learner), -EBADF, NULL);
	expect(modelio_write(learner, (void *)ones, 4, 0, PATIENCE), -EBADF, NULL);
}

static void a_contribution_counts_once(void)
{
	modelio_handle learner, weights;
	uint64_t version = 0;
	char text[64];
	double values[2] = { 3, 4 };

	expect(modelio_join(model, NULL, PATIENCE, &learner), 0, NULL);
	expect(modelio_write(learner, (void *)ones, SIZE, 0, PATIENCE), 0, NULL);
	expect(modelio_abort(learner, PATIENCE), 0, NULL);
	expect(modelio_write(learner, (void *)ones, SIZE / 2, SIZE / 2, PATIENCE), 0, NULL);
	expect(modelio_write(learner, (void *)ones, SIZE / 2, 0, PATIENCE), 0, NULL);
	expect(modelio_commit(learner, PATIENCE), 0, NULL);
	assert(first_weight(learner) == -1);
	expect(modelio_wait_version(model, 0, PATIENCE, &version), 0, NULL);
	assert(version == 1);
	expect(modelio_all_reduce(learner, "mean", values, 2, PATIENCE), 0, NULL);
	assert(values[0] == 3 && values[1] == 4);
	expect(modelio_all_reduce(learner, "median", values, 2, PATIENCE), -EINVAL, "median");
	expect(modelio_touch(learner), 0, NULL);
	expect(modelio_touch(model), -EBADF, "learner");
	expect(modelio_open_version(model, 1, PATIENCE, &weights), 0, NULL);
	expect(modelio_close(weights), 0, NULL);
	expect(modelio_open_version(model, 9, PATIENCE, &weights), -ENOENT, "version 9 is not here");
	expect(modelio_open_version(model, 1, PATIENCE, NULL), -EINVAL, "the place for the handle is NULL");
	expect(modelio_open_version(learner, 1, PATIENCE, &weights), -EBADF, "model");
	expect(modelio_get(learner, "version", text, sizeof text), 2, NULL);
	assert(!strcmp(text, "1\n"));
	expect(modelio_set(model, "settings.json", "{\"learning_rate\": 0.5, \"carry\": \"1\"}", PATIENCE), 0, NULL);
	expect(modelio_get(model, "control/learning_rate", text, sizeof text), 4, NULL);
	assert(!strcmp(text, "0.5\n"));
	expect(modelio_close(learner), 0, NULL);
}

static void *contribute(void *argument)
{
	size_t part = *(size_t *)argument;
	modelio_handle learner = *((modelio_handle *)argument + 1);
	expect(modelio_write(learner, (void *)ones, SIZE / 4, part * SIZE / 4, PATIENCE), 0, NULL);
	return NULL;
}

static void threads_may_share_a_learner(void)
{
	pthread_t threads[4];
	struct { size_t part; modelio_handle learner; } arguments[4];
	modelio_handle learner;
	float before = first_weight(model);

	expect(modelio_join(model, NULL, PATIENCE, &learner), 0, NULL);
	for (size_t at = 0; at < 4; at++) {
		arguments[at].part = at;
		arguments[at].learner = learner;
		assert(!pthread_create(&threads[at], NULL, contribute, &arguments[at]));
	}
	for (size_t at = 0; at < 4; at++)
		pthread_join(threads[at], NULL);
	expect(modelio_commit(learner, PATIENCE), 0, NULL);
	assert(first_weight(learner) == before - 0.5f);
	expect(modelio_close(learner), 0, NULL);
}

static int called;

static void callback(void *context, int64_t result)
{
	assert(context == &called && result == SIZE);
	called++;
}

static void a_queue_moves_files_and_contributions(const char *path)
{
	modelio_handle learner, weights;
	struct modelio_completion ended[4];
	struct modelio_queue_options wrong = { .engine = 9 };
	modelio_handle none;
	float before = first_weight(model), *back = malloc(SIZE);
	int descriptor = open(path, O_RDWR), file, contribution, version;
	size_t done = 0;

	expect(modelio_queue(&wrong, &none), -EINVAL, "engine 9");
	expect(modelio_add_file(queue, -1), -EBADF, NULL);
	expect(modelio_add_file(queue, 9999), -EBADF, NULL);
	expect(modelio_add(queue, model), -EBADF, "learner or weights");
	file = modelio_add_file(queue, descriptor);
	assert(file >= 0);
	close(descriptor);
	expect(modelio_join(model, NULL, PATIENCE, &learner), 0, NULL);
	contribution = modelio_add(queue, learner);
	expect(modelio_register(queue, ones, SIZE), 0, NULL);
	struct modelio_request requests[] = {
		{ .file = file, .op = MODELIO_WRITE, .data = ones, .size = SIZE, .timeout_ms = PATIENCE,
		  .callback = callback, .context = &called },
		{ .file = contribution, .op = MODELIO_WRITE, .data = ones, .size = SIZE, .timeout_ms = PATIENCE,
		  .callback = callback, .context = &called },
		{ .file = contribution, .op = MODELIO_SYNC, .timeout_ms = PATIENCE, .context = ended },
		{ .file = 99, .op = MODELIO_READ, .timeout_ms = PATIENCE },
	};
	expect(modelio_submit(queue, requests, 4), 3, "no file 99");
	expect(modelio_submit(queue, requests + 3, 1), -EBADF, NULL);
	struct pollfd event = { .fd = modelio_queue_event(queue), .events = POLLIN };
	while (done == 0 || called < 2) {
		assert(poll(&event, 1, PATIENCE) == 1);
		done += modelio_wait(queue, 0, ended + done, 4 - done, 0);
	}
	assert(called == 2 && done == 1 && ended[0].context == ended && ended[0].result == 0);
	assert(ended[0].id == requests[2].id);
	close(event.fd);
	assert(first_weight(learner) == before - 0.5f);
	expect(modelio_open_weights(model, PATIENCE, &weights), 0, NULL);
	version = modelio_add(queue, weights);
	expect(modelio_close(weights), 0, NULL);
	requests[0] = (struct modelio_request){ .file = version, .op = MODELIO_READ, .data = back, .size = SIZE,
						.timeout_ms = PATIENCE };
	requests[1] = (struct modelio_request){ .file = version, .op = MODELIO_WRITE, .data = ones, .size = 4,
						.timeout_ms = PATIENCE };
	expect(modelio_submit(queue, requests, 2), 2, NULL);
	for (done = 0; done < 2;)
		for (ssize_t found = modelio_wait(queue, 1, ended, 4, PATIENCE); found-- > 0; done++)
			assert(ended[found].result == (ended[found].id == requests[0].id ? SIZE : -EBADF));
	assert(back[0] == before - 0.5f && back[SIZE / 4 - 1] == back[0]);
	free(back);
	expect(modelio_remove(queue, version), 0, NULL);
	expect(modelio_remove(queue, version), -EBADF, NULL);
	/* A write that is refused fails the commit behind it, and an abort begins anew. */
	requests[0] = (struct modelio_request){ .file = contribution, .op = MODELIO_WRITE, .data = ones, .size = SIZE / 2,
						.timeout_ms = PATIENCE };
	requests[1] = (struct modelio_request){ .file = contribution, .op = MODELIO_WRITE, .data = ones, .size = SIZE,
						.offset = SIZE / 2, .timeout_ms = PATIENCE };
	requests[2] = (struct modelio_request){ .file = contribution, .op = MODELIO_SYNC, .timeout_ms = PATIENCE };
	expect(modelio_submit(queue, requests, 3), 3, NULL);
	for (done = 0; done < 3;)
		for (ssize_t found = modelio_wait(queue, 1, ended, 4, PATIENCE); found-- > 0; done++)
			assert(ended[found].result == (ended[found].id == requests[0].id ? SIZE / 2 : -EFBIG));
	expect(modelio_abort(learner, PATIENCE), 0, NULL);
	expect(modelio_write(learner, (void *)ones, SIZE, 0, PATIENCE), 0, NULL);
	expect(modelio_submit(queue, requests + 2, 1), 1, NULL);
	expect(modelio_wait(queue, 1, ended, 4, PATIENCE), 1, NULL);
	assert(ended[0].result == 0 && first_weight(learner) == before - 1);
	/* A learner that leaves does so, though a queue has it. */
	expect(modelio_close(learner), 0, NULL);
	expect(modelio_submit(queue, requests, 1), 1, NULL);
	expect(modelio_wait(queue, 1, ended, 4, PATIENCE), 1, NULL);
	assert(ended[0].result == -ENOTCONN);
}

static void a_publisher_says_something_of_its_version(void)
{
	modelio_handle publication, weights;
	struct modelio_version_info info;
	char name[64], text[64];

	expect(modelio_set(model, "control/reducer", "assign", PATIENCE), 0, NULL);
	expect(modelio_publish(model, &publication), 0, NULL);
	expect(modelio_write(publication, (void *)ones, SIZE, 0, PATIENCE), 0, NULL);
	expect(modelio_set(publication, "step", "7", PATIENCE), -EINVAL, "user.");
	expect(modelio_set(publication, "user.gradfs.x", "7", PATIENCE), -EINVAL, "gradfs.x");
	expect(modelio_set(publication, "user.step", "7", PATIENCE), 0, NULL);
	expect(modelio_commit(publication, PATIENCE), 0, NULL);
	expect(modelio_set(publication, "user.step", "8", PATIENCE), -EINVAL, "has ended");
	expect(modelio_close(publication), 0, NULL);
	expect(modelio_open_weights(model, PATIENCE, &weights), 0, NULL);
	expect(modelio_weights(weights, &info), 0, NULL);
	assert(*(const float *)info.data == 1 && info.epoch > 0);
	snprintf(name, sizeof name, "versions/%llu/meta.json", (unsigned long long)info.version);
	expect(modelio_get(model, name, text, sizeof text), 13, NULL);
	assert(!strcmp(text, "{\"step\":\"7\"}\n"));
	expect(modelio_close(weights), 0, NULL);
	expect(modelio_get(model, "versions/999/meta.json", text, sizeof text), -ENOENT, NULL);
}

static void a_forked_child_is_refused(void)
{
	modelio_handle child_queue;
	int status;
	pid_t child = fork();
	if (child == 0) {
		uint64_t version;
		if (modelio_wait_version(model, 0, 1, &version) != -EBADF || !strstr(modelio_error(), "forked"))
			_exit(1);
		if (modelio_queue(NULL, &child_queue) != -EBADF || modelio_close(queue) != -EBADF)
			_exit(2);
		_exit(0);
	}
	assert(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **arguments)
{
	assert(count == 4 && !strcmp(modelio_version(), "0.1.0") && !strcmp(modelio_error(), ""));
	ones = malloc(SIZE);
	for (size_t at = 0; at < SIZE / sizeof *ones; at++)
		ones[at] = 1;
	struct modelio_options options = { .transport = arguments[3] };
	expect(modelio_connect(arguments[1], &options, &model), 0, NULL);
	expect(modelio_queue(NULL, &queue), 0, NULL);
	wrong_calls_are_errors_and_change_nothing(arguments[1]);
	a_contribution_counts_once();
	threads_may_share_a_learner();
	a_queue_moves_files_and_contributions(arguments[2]);
	a_publisher_says_something_of_its_version();
	a_forked_child_is_refused();
	expect(modelio_close(queue), 0, NULL);
	free(ones);
	/* A program that exits leaves by itself. */
	modelio_handle learner;
	expect(modelio_join(model, "left", PATIENCE, &learner), 0, NULL);
	puts("all calls answered as they should");
	return 0;
}
