//! About the daemon itself.
#![forbid(unsafe_code)]

use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::schema::{Kind, Params, optional};
use crate::control::table::{self, Chapter, Method};
use serde_json::{Value, json};

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "The daemon",
    preface: "Which daemon answers, and what it can do.",
    methods: &[
        Method {
            name: "spdk_get_version",
            summary: "Tells the version, in the shape SPDK gives its own.",
            params: &[],
            result: "`version` (text) and `fields` (`major`, `minor`, `patch`, `suffix`, `commit`), of Rimrock.",
            run: |_, _| Box::pin(async { Ok(version()) }),
        },
        Method {
            name: "rpc_get_methods",
            summary: "Lists the names of all methods.",
            params: &[
                optional(
                    "current",
                    Kind::Bool,
                    "Accepted for SPDK's clients; every method is always callable.",
                ),
                optional("include_aliases", Kind::Bool, "Accepted for SPDK's clients; there are no aliases."),
            ],
            result: "a list of names.",
            run: |_, _| Box::pin(async { Ok(table::all().map(|method| method.name).collect()) }),
        },
        Method {
            name: "framework_get_reactors",
            summary: "Shows the polling threads and how much they have worked, in SPDK's shape.",
            params: &[],
            result: "`tick_rate`, `pid` and `reactors` (`lcore`, `busy` and `idle` in ticks of a nanosecond, and more).",
            run: |daemon, _| Box::pin(async move { Ok(reactors(&daemon)) }),
        },
        Method {
            name: "rpc_get_schema",
            summary: "Describes every method, or one, with its parameters.",
            params: &[optional("method", Kind::Text { max: 128 }, "Describe only this method.")],
            result: "a list of `{name, summary, params: [{name, type, values, required, doc}], result}`; `values` is null where there are too many to name.",
            run: |_, params| Box::pin(async move { schema(&params) }),
        },
    ],
};

fn version() -> Value {
    let number = |text: &str| text.parse::<u32>().unwrap_or(0);
    json!({
        "version": concat!("Rimrock v", env!("CARGO_PKG_VERSION")),
        "fields": {
            "major": number(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": number(env!("CARGO_PKG_VERSION_MINOR")),
            "patch": number(env!("CARGO_PKG_VERSION_PATCH")),
            "suffix": env!("CARGO_PKG_VERSION_PRE"),
            "commit": option_env!("RIMROCK_COMMIT").unwrap_or(""),
        },
    })
}

/// Time that is not spent asleep counts as busy, polling without finding work included.
fn reactors(daemon: &Daemon) -> Value {
    let up = u64::try_from(daemon.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let reactors: Vec<Value> = daemon
        .reactors
        .handles()
        .iter()
        .map(|reactor| {
            let stats = reactor.stats();
            json!({
                "lcore": reactor.core(),
                "busy": up.saturating_sub(stats.idle_ns),
                "idle": stats.idle_ns,
                "in_interrupt": false,
                "loops": stats.loops,
                "sleeps": stats.sleeps,
                "tasks": stats.tasks,
                "lw_threads": [{ "name": format!("reactor_{}", reactor.id()), "id": reactor.id().0 + 1 }],
            })
        })
        .collect();
    json!({ "tick_rate": 1_000_000_000, "pid": std::process::id(), "reactors": reactors })
}

fn schema(params: &Params) -> Result<Value, RpcError> {
    let wanted = params.text_opt("method")?;
    if let Some(name) = wanted
        && table::find(name).is_none()
    {
        return Err(RpcError::field("method", "is not a method"));
    }
    let described = table::all().filter(|method| wanted.is_none_or(|name| name == method.name)).map(|method| {
        let params: Vec<Value> = method
            .params
            .iter()
            .map(|param| {
                json!({
                    "name": param.name,
                    "type": param.kind.describe(),
                    "values": param.kind.values(),
                    "required": param.required,
                    "doc": param.doc,
                })
            })
            .collect();
        json!({ "name": method.name, "summary": method.summary, "params": params, "result": method.result })
    });
    Ok(described.collect())
}
