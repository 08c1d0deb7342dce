//! The kernels of NVIDIA GPUs, as text for the driver, and their names.

use libmodelio::bytes::kernels::Wire;

use crate::reducers::Function;

/// The kernels. `scripts/build-ptx` makes them of `kernels.cu`.
pub(super) const PTX: &str = include_str!("kernels.ptx");

/// All types of elements.
pub(super) const WIRES: [Wire; 6] = [Wire::F32, Wire::F64, Wire::F16, Wire::BF16, Wire::E4M3, Wire::E5M2];

/// The end of a kernel's name.
fn suffix(wire: Wire) -> &'static str {
    match wire {
        Wire::F64 => "f64",
        Wire::F32 => "f32",
        Wire::F16 => "f16",
        Wire::BF16 => "bf16",
        Wire::E4M3 => "e4m3",
        Wire::E5M2 => "e5m2",
    }
}

/// The name of the kernel that computes a formula.
pub(super) fn reducing(function: Function, wire: Wire) -> String {
    format!("{}_{}", function.name(), suffix(wire))
}

/// The name of the kernel that takes over new weights of a narrow type.
pub(super) fn adopting(wire: Wire) -> String {
    format!("adopt_{}", suffix(wire))
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    /// The values behind these words at the head of the PTX.
    fn head(name: &str) -> &'static str {
        let line = PTX.lines().find_map(|line| line.strip_prefix("// ")?.strip_prefix(name));
        line.expect("the head of kernels.ptx has it").trim()
    }

    #[test]
    fn the_kernels_are_those_of_the_source() {
        let source = include_bytes!("kernels.cu");
        let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, source);
        assert_eq!(head("source crc32:"), format!("{sum:08x}"), "run scripts/build-ptx");
    }

    #[test]
    fn every_formula_has_a_kernel_for_every_type() {
        let has = |name: String| PTX.contains(&format!(".visible .entry {name}("));
        for function in Function::iter() {
            for wire in WIRES {
                assert!(has(reducing(function, wire)), "{function:?} of {wire:?}");
            }
        }
        assert!(WIRES.into_iter().filter(|wire| wire.is_narrow()).all(|wire| has(adopting(wire))));
    }

    #[test]
    fn nothing_is_fused_or_approximate() {
        // A CPU rounds after each operation, and so do the kernels.
        let bad = ["fma.", "mad.f", "mad.rn", ".approx", ".ftz", "ex2", "rsqrt"];
        let operations = PTX.lines().filter(|line| line.starts_with('\t'));
        for line in operations {
            assert!(!bad.iter().any(|bad| line.contains(bad)), "{line}");
        }
        assert!(PTX.contains("div.rn.f32") && PTX.contains("sqrt.rn.f64"));
    }
}
