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

/// The parts of a sorted list of disjoint ranges that are in none of `others`, another such list.
pub fn without<T: Ord + Copy>(ranges: &[Range<T>], others: &[Range<T>]) -> Vec<Range<T>> {
    let mut rest = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut at = range.start;
        let from = others.partition_point(|other| other.end <= range.start);
        for other in others[from..].iter().take_while(|other| other.start < range.end) {
            if at < other.start {
                rest.push(at..other.start);
            }
            at = other.end;
        }
        if at < range.end {
            rest.push(at..range.end);
        }
    }
    rest
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

    #[test]
    fn the_ranges_of_others_are_taken_out() {
        let ranges = [0..10, 20..30, 40..50];
        assert_eq!(without(&ranges, &[]), ranges);
        assert_eq!(
            without(&ranges, &[2..4, 8..25, 26..27, 30..40, 49..60]),
            [0..2, 4..8, 25..26, 27..30, 40..49]
        );
        assert_eq!(without(&ranges, std::slice::from_ref(&(0..u32::MAX))), []);
    }
}
