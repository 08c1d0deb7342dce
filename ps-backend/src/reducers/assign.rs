//! `assign`: the last contribution, as it is.

use std::slice::from_ref;

use libmodelio::bytes::kernels::{
    Operands, Source, Total, bytes, bytes_mut, copy_checked, sources_are_finite, stream_copy, widen,
};
use libmodelio::vocabulary::reducer::{Hyper, Step};

use super::{Formula, Function, Reduce};

pub(super) struct Assign;

impl Reduce for Assign {
    fn pass(&self, _: &Step, Operands { wire, sources, input, output }: Operands<'_>, check: bool) -> bool {
        let Some((last, before)) = sources.split_last() else {
            stream_copy(input.weights, output.weights);
            if let (Some(old), Some(new)) = (input.master, output.master) {
                stream_copy(bytes(old), bytes_mut(new));
            }
            return true;
        };
        let finite = !check || sources_are_finite(wire, before);
        match last {
            // Other threads may be storing into the source: the checked bytes are read once.
            Source::Wire(src) if check && output.master.is_none() => {
                copy_checked(wire, src, output.weights) && finite
            }
            Source::Wire(src) if !check => {
                stream_copy(src, output.weights);
                if let Some(master) = output.master {
                    widen(wire, src, master);
                }
                true
            }
            _ => {
                let last = Operands { wire, sources: from_ref(last), input, output };
                last.reduce(Total::new, Total::new) && finite
            }
        }
    }

    fn formula(&self, _: &Step, _: bool) -> Formula {
        Formula::new(Function::Total, [], [])
    }

    fn is_inert(&self, _: &Hyper) -> bool {
        true
    }
}
