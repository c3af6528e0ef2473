//! Asking what differs between two nodes, or what one holds, in parts, from anywhere, while hosts write.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::chance::Chance;
use super::layout::{BLOCK, Layout, Version};
use super::world::World;
use crate::pool::{DiffRange, Pool, PoolErrorKind, RangeKind};

/// Parts that one answer may be given in.
const PARTS_MAX: usize = 100_000;

/// Compares two nodes, or looks for what one holds, and judges the answer.
pub(super) async fn compare(world: &World, pool: &Pool, chance: &mut Chance) {
    let names: Vec<String> = {
        let model = world.model.borrow();
        model.volumes.keys().chain(model.snapshots.keys()).cloned().collect()
    };
    let Some(node) = chance.pick(names.iter()).cloned() else { return };
    let base = match chance.happens(3, 4) {
        true => chance.pick(names.iter()).cloned(),
        false => None,
    };
    judge(world, pool, chance, base.as_deref(), &node).await;
}

/// Asks for one difference and judges it.
pub(super) async fn judge(world: &World, pool: &Pool, chance: &mut Chance, base: Option<&str>, node: &str) {
    let (asked, size) = {
        let mut model = world.model.borrow_mut();
        let Some(size) = model.size(node) else { return };
        model.watchers += 1;
        (model.tick(), size)
    };
    let from = match chance.below(3) {
        0 => chance.below(size / BLOCK as u64 + 1) * BLOCK as u64,
        _ => 0,
    };
    let ranges = ranges(world, pool, chance, base, node, from).await;
    let wrong = ranges.and_then(|ranges| {
        let model = world.model.borrow();
        let ours = model.versions_since(node, asked)?;
        let theirs = match base {
            Some(base) => model.versions_since(base, asked)?,
            None => Vec::new(),
        };
        misnamed(&model.layout, &ranges, from, &ours, &theirs)
    });
    world.model.borrow_mut().watchers -= 1;
    wrong.into_iter().for_each(|text| {
        world.complain(format!("difference of {node} and {base:?} from byte {from} on: {text}"));
    });
}

/// The whole answer, put together from parts of any size. `None` after an error, which was dealt with.
async fn ranges(
    world: &World,
    pool: &Pool,
    chance: &mut Chance,
    base: Option<&str>,
    node: &str,
    from: u64,
) -> Option<Vec<DiffRange>> {
    let mut ranges: Vec<DiffRange> = Vec::new();
    let mut at = from;
    for _ in 0..PARTS_MAX {
        let most = if chance.happens(1, 3) { 1 + chance.below(4) } else { 1000 } as usize;
        let part = match pool.diff_part(base, node, at, most).await {
            Ok(part) => part,
            // A volume may be under another name by now; nothing else takes names away here.
            Err(error) if error.kind == PoolErrorKind::NotFound => return None,
            Err(error) => {
                world.refused_by_pool(&format!("comparing {node} with {base:?}"), &error);
                return None;
            }
        };
        let end = part.next_offset.unwrap_or(u64::MAX);
        let inside =
            |range: &DiffRange| range.offset >= at && range.length > 0 && range.offset + range.length <= end;
        if part.ranges.len() > most || !part.ranges.iter().all(inside) || end <= at {
            world.complain(format!(
                "a part of a difference, asked from {at} on, up to {most} ranges: {part:?}"
            ));
            return None;
        }
        ranges.extend(part.ranges);
        match part.next_offset {
            Some(next) => at = next,
            None => return Some(ranges),
        }
    }
    world.complain(format!("the difference of {node} and {base:?} does not end"));
    None
}

/// What is wrong with an answer, when each block of the node was one of `ours` meanwhile, and of what it was compared with
/// one of `theirs`.
fn misnamed(
    layout: &Layout,
    ranges: &[DiffRange],
    from: u64,
    ours: &[Vec<Version>],
    theirs: &[Vec<Version>],
) -> Option<String> {
    let mut named: BTreeMap<u64, RangeKind> = BTreeMap::new();
    let mut reached = 0;
    for range in ranges {
        if range.offset < reached {
            return Some(format!("ranges overlap or go back at byte {}", range.offset));
        }
        reached = range.offset + range.length;
        named.extend((range.offset..reached).step_by(BLOCK).map(|offset| (offset, range.kind)));
    }
    let nothing = vec![0];
    for (spot, ours) in ours.iter().enumerate() {
        let offset = layout.offset(spot);
        if offset < from {
            continue;
        }
        let theirs = theirs.get(spot).unwrap_or(&nothing);
        let found = named.remove(&offset);
        let fits = |a: Version, b: Version| match found {
            None => a == b,
            Some(RangeKind::Zero) => a == 0 && b != 0,
            Some(RangeKind::Data) => a != 0 && a != b,
        };
        if !ours.iter().any(|a| theirs.iter().any(|b| fits(*a, *b))) {
            return Some(format!("byte {offset} is named {found:?}; there may be {ours:?} over {theirs:?}"));
        }
    }
    named
        .into_iter()
        .next()
        .map(|(offset, kind)| format!("byte {offset} is named {kind:?}; nobody wrote there"))
}
