//! Which bytes of a model go where: to shards, and to the connections with each, in equal shares.

use std::ops::Range;

/// Share `index` of `count` of `bytes` bytes, in whole pages apart from the last.
pub fn share(bytes: usize, index: usize, count: usize) -> Range<usize> {
    let pages = bytes.div_ceil(4096);
    let page = |index: usize| (pages * index / count * 4096).min(bytes);
    page(index)..page(index + 1)
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn shares_are_all_there_is() {
        for (bytes, count) in [(4096, 4), (1 << 20, 3), (1_000_004, 4), (4, 1)] {
            let mut end = 0;
            for index in 0..count {
                let share = share(bytes, index, count);
                assert_eq!(share.start, end);
                end = share.end;
            }
            assert_eq!(end, bytes);
        }
    }
}
