//! Loops over what a learner has written: what is sent of it.
//!
//! They take a block just after it was written, and it is sent soon. So nothing is streamed past the caches.

use super::{Line, Pass, Piece, Split, Staged, Wire, elements, get, get_cold, put, put_narrow};

/// `out = scale * (model - base)`, or `scale * model` without a base.
pub(crate) struct Difference<'a> {
    pub wire: Wire,
    pub scale: f64,
    pub model: &'a [u8],
    pub base: Option<&'a [u8]>,
    pub out: &'a mut [u8],
}

impl Pass for Difference<'_> {
    fn split(&self) -> Split {
        Split::new(elements(self.wire, self.model), std::iter::empty())
    }

    #[inline(always)]
    fn piece<L: Line>(&mut self, seen: L::Exponents, piece: Piece, _: bool) -> L::Exponents {
        let value: L = get(self.wire, self.model, piece);
        let difference = match self.base {
            Some(base) => value - get_cold(self.wire, base, piece),
            None => value,
        };
        let difference = L::splat(self.scale as f32) * difference;
        store(self.wire, difference, self.out, piece);
        // As it was rounded to the type.
        get::<L>(self.wire, self.out, piece).exponents(seen)
    }
}

/// `out` is the correction `elasticity * (replica - central)`, and `next` is `model` less the correction.
pub(crate) struct Correction<'a> {
    pub wire: Wire,
    pub elasticity: f64,
    pub model: &'a [u8],
    pub replica: &'a [u8],
    pub central: &'a [u8],
    pub out: &'a mut [u8],
    pub next: &'a mut [u8],
}

impl Pass for Correction<'_> {
    fn split(&self) -> Split {
        Split::new(elements(self.wire, self.model), std::iter::empty())
    }

    #[inline(always)]
    fn piece<L: Line>(&mut self, seen: L::Exponents, piece: Piece, _: bool) -> L::Exponents {
        let Self { wire, elasticity, model, replica, central, out, next } = self;
        let value: L = get(*wire, model, piece);
        let apart = get_cold::<L>(*wire, replica, piece) - get_cold(*wire, central, piece);
        store(*wire, L::splat(*elasticity as f32) * apart, out, piece);
        // The replica loses exactly what the central model gets, however that was rounded.
        let correction: L = get(*wire, out, piece);
        store(*wire, value - correction, next, piece);
        if wire.is_narrow() {
            // The next replica was rounded, too, and coarsely.
            store(*wire, value - get(*wire, next, piece), out, piece);
        }
        get::<L>(*wire, out, piece).exponents(value.exponents(seen))
    }
}

#[inline(always)]
fn store<L: Line>(wire: Wire, value: L, dst: &mut [u8], piece: Piece) {
    // SAFETY: nothing is streamed.
    unsafe {
        match wire {
            Wire::F32 => put(value, dst, piece, false),
            _ => put_narrow(wire, value, dst, piece, false, &mut Staged::default()),
        }
    }
}
