//! The types of 8 bits as their specification defines them, slowly and in f64: what kernels are compared with.

use std::sync::LazyLock;

use libmodelio::bytes::kernels::Wire;

/// The magnitudes of the codes up to the largest finite one, and for E5M2 the number that infinity's code would be.
static E4M3: LazyLock<Vec<f64>> = LazyLock::new(|| (0..0x7f).map(|code| magnitude(code, 3, 7)).collect());
static E5M2: LazyLock<Vec<f64>> = LazyLock::new(|| (0..0x7d).map(|code| magnitude(code, 2, 15)).collect());

/// The number that a code without sign stands for, with so many bits of mantissa and this bias.
fn magnitude(code: u8, mantissa: i32, bias: i32) -> f64 {
    let (exponent, fraction) = (i32::from(code >> mantissa), f64::from(code & ((1 << mantissa) - 1)));
    let share = fraction / 2f64.powi(mantissa);
    match exponent {
        0 => share * 2f64.powi(1 - bias),
        _ => (1.0 + share) * 2f64.powi(exponent - bias),
    }
}

fn magnitudes(wire: Wire) -> &'static [f64] {
    if wire == Wire::E4M3 { &E4M3 } else { &E5M2 }
}

/// The number that a code stands for.
pub fn value(wire: Wire, code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let value = match (wire, code & 0x7f) {
        (Wire::E4M3, 0x7f) | (Wire::E5M2, 0x7d..) => f64::NAN,
        (Wire::E5M2, 0x7c) => f64::INFINITY,
        (_, code) => magnitudes(wire)[usize::from(code)],
    };
    sign * value
}

/// The code of the nearest number; of two, the even one. E4M3 has no infinity: what is too large becomes its largest
/// number, but infinity NaN.
pub fn code(wire: Wire, value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let all = magnitudes(wire);
    let size = value.abs();
    let above = all.partition_point(|known| *known < size);
    let code = match () {
        () if size.is_nan() || wire == Wire::E4M3 && size.is_infinite() => 0x7f,
        () if above == all.len() => all.len() - 1,
        () if above == 0 => 0,
        () => {
            let [below, over] = [size - all[above - 1], all[above] - size];
            let is_even = above.is_multiple_of(2);
            if over < below || over == below && is_even { above } else { above - 1 }
        }
    };
    sign | code as u8
}
