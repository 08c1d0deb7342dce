//! `weights += gradients`, with the widest vectors that the processor has.

use multiversion::multiversion;

/// Adds little-endian fp32 `gradients`, aligned or not, to `weights` of the same length in bytes.
pub fn add(weights: &mut [f32], gradients: &[u8]) {
    assert_eq!(size_of_val(weights), gradients.len(), "lengths of weights and gradients");
    add_dispatched(weights, gradients);
}

// AVX-512 before AVX2 was no faster in cache and slower to warm up, so 256 bits it is.
#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
fn add_dispatched(weights: &mut [f32], gradients: &[u8]) {
    let (gradients, _) = gradients.as_chunks::<4>();
    for (weight, gradient) in weights.iter_mut().zip(gradients) {
        *weight += f32::from_le_bytes(*gradient);
    }
}

#[cfg(test)]
mod tests {
    use super::add;

    #[test]
    fn adds_from_any_address() {
        let values: Vec<u8> = (0..1000).flat_map(|i| (i as f32).to_le_bytes()).collect();
        for shift in 0..4 {
            let mut shifted = vec![0; shift];
            shifted.extend(&values);
            let mut weights = vec![0.5; 1000];
            add(&mut weights, &shifted[shift..]);
            assert!(weights.iter().enumerate().all(|(i, weight)| *weight == i as f32 + 0.5));
        }
    }
}
