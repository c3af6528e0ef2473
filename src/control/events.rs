//! What has happened lately, numbered, in memory. Whoever asks says from which number on; what was so long ago that its
//! place was needed is missing, and the answer says how much.
//!
//! Nothing here survives a restart of the daemon; the numbers begin anew then, and `since` of an earlier life finds
//! whatever is there.
#![forbid(unsafe_code)]

use crate::pool::{NodeKind, PoolEvent, PoolEventKind};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Events kept.
const KEPT: usize = 4096;

/// The latest events.
#[derive(Debug, Default)]
pub struct Events {
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    /// In order; the first is number `last + 1 - events.len()`.
    events: VecDeque<Value>,
    /// Number of the newest.
    last: u64,
}

/// What was asked for.
#[derive(Debug, PartialEq)]
pub struct Part {
    /// The events, oldest first.
    pub events: Vec<Value>,
    /// What to ask for next as `since`.
    pub next: u64,
    /// Events since `since` that are gone.
    pub missed: u64,
}

impl Events {
    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an event, with its number and the time.
    pub fn add(&self, event: &PoolEvent) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut ring = self.ring();
        ring.last += 1;
        let sequence = ring.last;
        ring.events.push_back(described(event, sequence, time));
        while ring.events.len() > KEPT {
            ring.events.pop_front();
        }
    }

    /// Up to `limit` events with numbers above `since`.
    pub fn after(&self, since: u64, limit: usize) -> Part {
        let ring = self.ring();
        let before = ring.last - ring.events.len() as u64;
        // A number that was not given yet is one of an earlier life.
        let since = if since > ring.last { 0 } else { since };
        let skip = since.saturating_sub(before) as usize;
        let events: Vec<Value> = ring.events.iter().skip(skip).take(limit).cloned().collect();
        let next = since.max(before) + events.len() as u64;
        Part { events, next, missed: before.saturating_sub(since) }
    }
}

fn described(event: &PoolEvent, sequence: u64, time: u64) -> Value {
    let noun = |kind: NodeKind| match kind {
        NodeKind::Volume => "volume",
        NodeKind::Snapshot => "snapshot",
    };
    let (kind, details, text) = match &event.kind {
        PoolEventKind::Threshold { percent, rising, used_percent } => {
            let direction = if *rising { "rising" } else { "falling" };
            let text = match rising {
                true => format!("{used_percent} % of pool {} is in use ({percent} % and more)", event.pool),
                false => format!("{used_percent} % of pool {} is in use (less than {percent} %)", event.pool),
            };
            let details = json!({ "percent": percent, "direction": direction, "used_percent": used_percent });
            ("pool_threshold".to_owned(), details, text)
        }
        PoolEventKind::Created { kind, name } => {
            let kind = noun(*kind);
            (format!("{kind}_created"), json!({ "name": name }), format!("{kind} {name} was created"))
        }
        PoolEventKind::Deleted { kind, name } => {
            let kind = noun(*kind);
            (format!("{kind}_deleted"), json!({ "name": name }), format!("{kind} {name} was deleted"))
        }
        PoolEventKind::Damage { text } => ("damage_found".to_owned(), json!({}), text.clone()),
    };
    let mut object =
        json!({ "sequence": sequence, "time": time, "kind": kind, "pool": event.pool, "text": text });
    if let (Value::Object(object), Value::Object(details)) = (&mut object, details) {
        object.extend(details);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn damage(text: &str) -> PoolEvent {
        PoolEvent { pool: "p".into(), kind: PoolEventKind::Damage { text: text.into() } }
    }

    #[test]
    fn every_event_is_told_once_or_counted_as_missed() {
        let events = Events::default();
        assert_eq!(events.after(0, 10), Part { events: vec![], next: 0, missed: 0 });
        for at in 0..10 {
            events.add(&damage(&at.to_string()));
        }
        let part = events.after(0, 4);
        let sequences: Vec<u64> = part.events.iter().filter_map(|event| event["sequence"].as_u64()).collect();
        assert_eq!((sequences, part.next, part.missed), (vec![1, 2, 3, 4], 4, 0));
        assert_eq!(events.after(4, 100).events.len(), 6);
        assert_eq!(events.after(10, 100), Part { events: vec![], next: 10, missed: 0 });
        for _ in 0..KEPT {
            events.add(&damage("x"));
        }
        let part = events.after(4, 1);
        assert_eq!((part.events[0]["sequence"].as_u64(), part.next, part.missed), (Some(11), 11, 6));
        // From before a restart.
        assert_eq!(events.after(1 << 40, usize::MAX).events.len(), KEPT);
    }
}
