//! What has happened.
#![forbid(unsafe_code)]

use crate::control::schema::{Kind, UNSIGNED, optional};
use crate::control::table::{Chapter, Method};
use serde_json::json;

/// Events in one answer.
const LIMIT_MAX: u64 = 1000;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Events",
    preface: "The daemon numbers what happens and keeps the latest 4096 in memory. Kinds: `pool_threshold` (75, 85 or 95 % \
              of the room for data in use, `direction` `rising`, or `falling` when it is 5 % below), `volume_created`, \
              `volume_deleted`, `snapshot_created`, `snapshot_deleted`, `damage_found`.",
    methods: &[Method {
        name: "events_get",
        summary: "Tells what has happened since an event.",
        params: &[
            optional("since", UNSIGNED, "Only events after this number: `next` of the answer before."),
            optional(
                "limit",
                Kind::Unsigned { min: 1, max: LIMIT_MAX },
                "The most events to tell, the oldest first; 1000 when left out.",
            ),
        ],
        result: "`events` (a list of `{sequence, time, kind, pool, text, …}`, oldest first), `next`, and `missed`: how many \
                 after `since` are no longer kept.",
        run: |daemon, params| {
            Box::pin(async move {
                let limit = params.u64_opt("limit")?.unwrap_or(LIMIT_MAX) as usize;
                let part = daemon.events.after(params.u64_opt("since")?.unwrap_or(0), limit);
                Ok(json!({ "events": part.events, "next": part.next, "missed": part.missed }))
            })
        },
    }],
};
