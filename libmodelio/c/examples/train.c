/*
 * A learner that fits a model of fp32 to a target, without a mount:
 *
 *     gradfs shard --listen 127.0.0.1:7070 &
 *     gradfs create m --registry 127.0.0.1:7070 --size 1MiB --reducer sgd --learning-rate 0.5
 *     cc train.c $(pkg-config --cflags --libs modelio) -o train && ./train gradfs://127.0.0.1:7070/m 20
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "modelio.h"

#define PATIENCE 30000
#define TARGET 1.0f

static void check(int64_t answer, const char *what)
{
	if (answer < 0) {
		fprintf(stderr, "%s: %s (%s)\n", what, modelio_error(), strerror((int)-answer));
		exit(1);
	}
}

int main(int count, char **arguments)
{
	modelio_handle model, learner, weights, queue;

	if (count != 3) {
		fprintf(stderr, "give two arguments: gradfs://HOST:PORT/MODEL STEPS\n");
		return 2;
	}
	check(modelio_connect(arguments[1], NULL, &model), "connect");
	check(modelio_join(model, NULL, PATIENCE, &learner), "join");
	check(modelio_queue(NULL, &queue), "queue");
	int file = modelio_add(queue, learner);
	check(file, "add");
	for (int step = 0; step < atoi(arguments[2]); step++) {
		struct modelio_version_info version;

		/* The version that has this learner's last step. */
		check(modelio_open_weights(learner, PATIENCE, &weights), "weights");
		check(modelio_weights(weights, &version), "weights");
		size_t elements = version.size / sizeof(float);
		const float *values = (const float *)version.data;
		float *gradients = malloc(version.size);
		double loss = 0;
		if (!gradients)
			return 1;
		for (size_t at = 0; at < elements; at++) {
			gradients[at] = values[at] - TARGET;
			loss += gradients[at] * gradients[at] / elements;
		}
		printf("version %llu: loss %.6f\n", (unsigned long long)version.version, loss);
		check(modelio_close(weights), "close");

		/* The contribution, and its commit behind it. Blocks travel while others are written. */
		struct modelio_request requests[] = {
			{ .file = file, .op = MODELIO_WRITE, .data = gradients, .size = version.size,
			  .timeout_ms = PATIENCE },
			{ .file = file, .op = MODELIO_SYNC, .timeout_ms = PATIENCE },
		};
		struct modelio_completion ended[2];
		check(modelio_submit(queue, requests, 2), "submit");
		for (int done = 0; done < 2;) {
			ssize_t found = modelio_wait(queue, 1, ended, 2, 2 * PATIENCE);
			check(found, "wait");
			for (ssize_t at = 0; at < found; at++, done++)
				if (ended[at].result < 0) {
					fprintf(stderr, "step %d: %s\n", step, strerror((int)-ended[at].result));
					return 1;
				}
		}
		free(gradients);
	}
	check(modelio_close(queue), "close");
	check(modelio_close(learner), "leave");
	check(modelio_close(model), "close");
	return 0;
}
