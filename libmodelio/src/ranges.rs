//! Sets of byte ranges as sorted lists.

use std::ops::Range;

/// Adds `new` to a sorted list of disjoint ranges, merging what touches. Empty ranges add nothing.
pub fn insert<T: Ord + Copy>(ranges: &mut Vec<Range<T>>, new: Range<T>) {
    if new.start >= new.end {
        return;
    }
    let from = ranges.partition_point(|range| range.end < new.start);
    let to = from + ranges[from..].partition_point(|range| range.start <= new.end);
    if from == to {
        ranges.insert(from, new);
    } else {
        let merged = ranges[from].start.min(new.start)..ranges[to - 1].end.max(new.end);
        ranges[from] = merged;
        ranges.drain(from + 1..to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_where_they_touch() {
        let mut set = Vec::new();
        for new in [10..20, 30..40, 50..60, 20..25, 5..5, 24..55] {
            insert(&mut set, new);
        }
        insert(&mut set, 0..3);
        assert_eq!(set, vec![0..3, 10..60]);
    }
}
