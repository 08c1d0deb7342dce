// A learner that fits a model of fp32 to a target, without a mount. See train.c for what to start first:
//
//     c++ -std=c++17 train.cpp $(pkg-config --cflags --libs modelio) -o train && ./train gradfs://127.0.0.1:7070/m 20

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "modelio.hpp"

using namespace std::chrono_literals;

constexpr auto PATIENCE = 30s;
constexpr float TARGET = 1.0F;

int main(int count, char **arguments) try {
    if (count != 3) {
        std::fputs("give two arguments: gradfs://HOST:PORT/MODEL STEPS\n", stderr);
        return 2;
    }
    modelio::Model model(arguments[1]);
    modelio::Learner learner = model.join(PATIENCE);
    for (int step = 0; step < std::atoi(arguments[2]); step++) {
        // The version that has this learner's last step.
        const modelio::Weights weights = learner.weights(PATIENCE);
        const auto *values = static_cast<const float *>(weights.data());
        std::vector<float> gradients(values, values + weights.size() / sizeof(float));
        double loss = 0;
        for (float &gradient : gradients) {
            gradient -= TARGET;
            loss += gradient * gradient / gradients.size();
        }
        std::printf("version %llu: loss %.6f\n", static_cast<unsigned long long>(weights.version()), loss);
        learner.write(gradients.data(), weights.size(), 0, PATIENCE);
        learner.commit(PATIENCE);
    }
    return 0;
} catch (const modelio::Error &error) {
    std::fprintf(stderr, "%s (errno %d)\n", error.what(), error.code().value());
    return 1;
}
