//! What an operator does to keep a pool well: scrubs that are started, stopped and taken up again, checks that repair,
//! and the question what is damaged.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::time::Duration;

use super::chance::Chance;
use super::life::BALLAST;
use super::world::World;
use crate::pool::{CheckOptions, CheckReport, Kind, Pool, PoolEventKind, ScrubStatus};

/// How a scrub stands, as far as its answers tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Scrubbing {
    /// Nobody can know.
    #[default]
    Unknown,
    /// It was started: it runs, or has come to its end.
    Started,
    /// It was stopped before its end.
    Stopped,
}

/// Starts, stops or looks at the scrub.
pub(super) async fn scrub(world: &World, pool: &Pool, chance: &mut Chance) {
    let before = world.scrub.get();
    let (what, answer) = match chance.below(4) {
        0 | 1 => {
            let rate = (1 + chance.below(200)) << 20;
            let anew = chance.happens(1, 3);
            world.scrub.set(Scrubbing::Unknown);
            world.scrubbed.set((None, 0));
            (Scrubbing::Started, pool.scrub_start(Some(rate), anew).await)
        }
        2 => {
            world.scrub.set(Scrubbing::Unknown);
            (Scrubbing::Stopped, pool.scrub_stop().await)
        }
        _ => (before, pool.scrub_status().await),
    };
    match answer {
        Ok(status) => {
            world.say(|| format!("scrub: {what:?}, {} of {}", status.bytes_done, status.bytes_total));
            judge_scrub(world, what, &status);
            world.scrub.set(match (what, status.state) {
                (Scrubbing::Stopped, "stopped") => Scrubbing::Stopped,
                (Scrubbing::Started, _) => Scrubbing::Started,
                _ => Scrubbing::Unknown,
            });
        }
        Err(error) => {
            world.refused_by_pool("asking for a scrub", &error);
        }
    }
}

/// After an import: what was started goes on, and what was stopped stays so.
pub(super) async fn judge_scrub_after_import(world: &World, pool: &Pool) {
    match pool.scrub_status().await {
        Ok(status) => judge_scrub(world, world.scrub.get(), &status),
        Err(error) => {
            world.refused_by_pool("asking for the scrub", &error);
        }
    }
}

fn judge_scrub(world: &World, what: Scrubbing, status: &ScrubStatus) {
    let fits = match what {
        Scrubbing::Unknown => true,
        // It ends early when a device fails.
        Scrubbing::Started => {
            status.state == "running"
                || world.faulty
                || (status.state == "idle" && status.last_completed.is_some())
        }
        Scrubbing::Stopped => status.state != "running",
    };
    if !fits {
        world.complain(format!("the scrub should be as if {what:?}, but: {status:?}"));
    }
    let ended = status.last_completed.as_ref().map_or((0, 0), |end| (end.errors, end.healed));
    let found = (status.errors + ended.0, status.healed + ended.1);
    if !world.rotten.get() && !world.failed && found != (0, 0) {
        world.complain(format!("a scrub found damage where nothing is damaged: {status:?}"));
    }
    // Within one scrub of one life nothing that was done is undone.
    let seen = (status.started, status.bytes_done);
    let last = world.scrubbed.replace(seen);
    if status.state == "running" && seen.0 == last.0 && seen.1 < last.1 {
        world.complain(format!("a scrub went back from {} to {} bytes", last.1, seen.1));
    }
}

/// Lets the pool repair itself after bits were flipped on a closed pool: metadata comes back, data that is lost is named with
/// every place it had, and a second look finds nothing that could still be repaired.
pub(super) async fn repair(world: &World, pool: &Pool) {
    let lost = world.model.borrow().lost_places();
    let Some(first) = examine(world, pool, true).await else { return };
    judge_findings(world, &first, &lost);
    let Some(second) = examine(world, pool, false).await else { return };
    judge_findings(world, &second, &lost);
    if let Some(left) = second.findings.iter().find(|finding| finding.repairable) {
        world.complain(format!("after a repair this is still to be repaired: {left:?}"));
    }
    world.repaired.set(true);
    if lost.is_empty() {
        return;
    }
    // What was found is told within seconds.
    for _ in 0..60 {
        let told = world.events.lock().is_ok_and(|events| {
            events.iter().any(|event| matches!(event.kind, PoolEventKind::Damage { .. }))
        });
        if told {
            return;
        }
        crate::reactor::sleep(Duration::from_millis(100)).await;
    }
    world.complain(format!("nobody was told of damage at {lost:?}"));
}

async fn examine(world: &World, pool: &Pool, repair: bool) -> Option<CheckReport> {
    match pool.check(CheckOptions { repair, data: true }).await {
        Ok(report) => Some(report),
        Err(error) => {
            world.refused_by_pool("checking", &error);
            None
        }
    }
}

/// Data found damaged must be what was damaged, in each place, and all of it.
fn judge_findings(world: &World, report: &CheckReport, lost: &BTreeSet<(String, u64)>) {
    let mut named = BTreeSet::new();
    for finding in report.findings.iter().filter(|finding| finding.kind == Kind::Data) {
        for extent in &finding.extents {
            named.extend(
                (extent.offset..extent.offset + extent.length)
                    .step_by(4096)
                    .map(|at| (extent.name.clone(), at)),
            );
        }
    }
    // Of what is being deleted only the number is left, which no model knows; nor what takes up space.
    named.retain(|(name, _)| !name.starts_with("deleted node") && name != BALLAST);
    if named != *lost {
        world.complain(format!("lost are {lost:?}, but a check names {named:?}: {:?}", report.findings));
    }
    let bad = report
        .findings
        .iter()
        .find(|finding| finding.severity > crate::pool::Severity::Degraded && finding.kind != Kind::Data);
    if let Some(bad) = bad {
        world.complain(format!("one flipped bit in one copy, and this is wrong: {bad:?}"));
    }
}
