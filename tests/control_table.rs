//! Every method of the table with every kind of wrong parameter: refused with the field at fault, and nothing is made,
//! changed or lost by it.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Client, Daemon, free_port};
use nix::sys::signal::Signal;
use rimrock::control::schema::{Kind, Param};
use rimrock::control::table::{self, Method};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

const NQN: &str = "nqn.2014-08.org.example:s";
const HOST: &str = "nqn.2014-08.org.example:h";
const UUID: &str = "8b1e1c4a-1f5e-4d9a-9d0e-3a3a7a7d7b11";
/// The longest refusal: what a client sent must not come back as a whole.
const REFUSAL_MAX: usize = 4096;
/// The longest time of a call that has nothing to do, on a busy machine.
const CALL_MAX: Duration = Duration::from_secs(2);

/// What exists: a pool with a volume, a snapshot, a free device, and a subsystem that shows the volume.
fn prepare(daemon: &Daemon, port: u16) {
    for (method, params) in [
        ("device_create", json!({ "name": "disk", "uri": "ram:128MiB" })),
        ("device_create", json!({ "name": "free", "uri": "ram:64MiB" })),
        ("bdev_malloc_create", json!({ "name": "malloc", "num_blocks": 16, "block_size": 4096 })),
        ("pool_create", json!({ "name": "main", "devices": ["disk"] })),
        ("volume_create", json!({ "name": "v", "size": 1 << 20 })),
        ("volume_create", json!({ "name": "shown", "size": 1 << 20 })),
        ("snapshot_create", json!({ "volume": "v", "name": "v@1" })),
        ("nvmf_create_subsystem", json!({ "nqn": NQN, "serial_number": "S" })),
        ("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "main/shown" } })),
        ("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": HOST })),
        ("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address(port) })),
    ] {
        daemon.call(method, params);
    }
}

/// Takes away whatever there is.
fn clear(daemon: &Daemon) {
    for transfer in list(daemon, "snapshot_transfer_list") {
        daemon.call("snapshot_transfer_end", json!({ "session": transfer["session"] }));
    }
    for subsystem in list(daemon, "nvmf_get_subsystems").iter().skip(1) {
        daemon.call("nvmf_delete_subsystem", json!({ "nqn": subsystem["nqn"] }));
    }
    for method in ["volume_list", "snapshot_list"] {
        for node in list(daemon, method) {
            let name = format!("{}/{}", node["pool"].as_str().unwrap(), node["name"].as_str().unwrap());
            for pin in node["pins"].as_array().unwrap() {
                let unpin = method.replace("list", "unpin");
                daemon.call(&unpin, json!({ "name": name, "by": pin["by"] }));
            }
        }
    }
    for pool in list(daemon, "pool_list") {
        daemon.call("pool_destroy", json!({ "name": pool["name"], "confirm": pool["name"] }));
    }
    for device in list(daemon, "device_list") {
        daemon.call("device_delete", json!({ "name": device["name"] }));
    }
}

fn list(daemon: &Daemon, method: &str) -> Vec<Value> {
    daemon.call(method, Value::Null).as_array().unwrap().clone()
}

fn address(port: u16) -> Value {
    json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string() })
}

/// All that a refused call must leave as it is.
fn state(daemon: &Daemon) -> Value {
    let pools: Vec<Value> = list(daemon, "pool_list")
        .iter()
        .map(|pool| json!([pool["name"], pool["uuid"], pool["volumes"], pool["snapshots"]]))
        .collect();
    let mut devices = list(daemon, "device_list");
    for device in &mut devices {
        // Counts what the pool writes by itself as well.
        device.as_object_mut().unwrap().remove("traffic");
    }
    json!({
        "devices": devices,
        "pools": pools,
        "volumes": list(daemon, "volume_list"),
        "snapshots": list(daemon, "snapshot_list"),
        "bdevs": list(daemon, "bdev_get_bdevs"),
        "subsystems": list(daemon, "nvmf_get_subsystems"),
        "transports": list(daemon, "nvmf_get_transports"),
        "transfers": list(daemon, "snapshot_transfer_list"),
    })
}

/// Parameters with which the call would be made, if nothing were wrong with it.
fn example(method: &Method, port: u16) -> Map<String, Value> {
    let params = match method.name {
        "device_create" => json!({ "name": "new", "uri": "ram:1MiB" }),
        "device_get" | "device_delete" => json!({ "name": "free" }),
        "pool_create" => json!({ "name": "new", "devices": ["free"] }),
        "pool_import" => json!({ "devices": ["disk"] }),
        "pool_export" | "pool_get" | "pool_check" | "pool_damage_list" | "pool_damage_clear"
        | "pool_scrub_start" | "pool_scrub_stop" | "pool_get_scrub" => json!({ "name": "main" }),
        "pool_destroy" => json!({ "name": "main", "confirm": "main" }),
        "volume_create" => json!({ "name": "new", "size": 1 << 20 }),
        "volume_get" | "volume_delete" | "volume_export" => json!({ "name": "v" }),
        "volume_unexport" => json!({ "name": "shown" }),
        "volume_resize" => json!({ "name": "v", "size": 2 << 20 }),
        "volume_rename" => json!({ "name": "v", "new_name": "new" }),
        "volume_rollback" => json!({ "snapshot": "v@1" }),
        "snapshot_create" => json!({ "volume": "v", "name": "v@2" }),
        "snapshot_create_group" => json!({ "snapshots": [{ "volume": "v", "name": "v@2" }] }),
        "snapshot_get" | "snapshot_delete" => json!({ "name": "v@1" }),
        "snapshot_diff" => json!({ "from": "v@1", "to": "v" }),
        "snapshot_pin" | "snapshot_unpin" => json!({ "name": "v@1", "by": "somebody" }),
        "volume_promote" => json!({ "name": "v" }),
        "snapshot_send_begin" => json!({ "name": "v@1" }),
        "snapshot_receive_begin" => {
            json!({ "name": "v@2", "uuid": UUID, "size": 1 << 20, "created": 1 })
        }
        "snapshot_receive_diff" | "snapshot_receive_commit" | "snapshot_transfer_end" => {
            json!({ "session": UUID })
        }
        "clone_create" => json!({ "snapshot": "v@1", "name": "new" }),
        "nvmf_create_transport" => json!({ "trtype": "TCP" }),
        "nvmf_create_subsystem" => json!({ "nqn": "nqn.2014-08.org.example:new" }),
        "nvmf_subsystem_add_ns" => json!({ "nqn": NQN, "namespace": { "bdev_name": "free" } }),
        "nvmf_subsystem_remove_ns" => json!({ "nqn": NQN, "nsid": 1 }),
        "nvmf_subsystem_add_listener" => json!({ "nqn": NQN, "listen_address": address(port + 1) }),
        "nvmf_subsystem_remove_listener" => json!({ "nqn": NQN, "listen_address": address(port) }),
        "nvmf_subsystem_listener_set_ana_state" => {
            json!({ "nqn": NQN, "listen_address": address(port), "ana_state": "inaccessible" })
        }
        "nvmf_discovery_add_referral" | "nvmf_discovery_remove_referral" => {
            json!({ "address": address(port) })
        }
        "nvmf_subsystem_add_host" => json!({ "nqn": NQN, "host": "nqn.2014-08.org.example:other" }),
        "nvmf_subsystem_remove_host" => json!({ "nqn": NQN, "host": HOST }),
        "nvmf_subsystem_allow_any_host" => json!({ "nqn": NQN, "allow_any_host": true }),
        "nvmf_delete_subsystem"
        | "nvmf_subsystem_get_listeners"
        | "nvmf_subsystem_get_controllers"
        | "nvmf_subsystem_get_qpairs" => json!({ "nqn": NQN }),
        "bdev_malloc_create" => json!({ "num_blocks": 16, "block_size": 4096 }),
        "bdev_malloc_delete" => json!({ "name": "malloc" }),
        "bdev_aio_create" | "bdev_uring_create" => json!({ "name": "new", "filename": "/nowhere/disk" }),
        "bdev_aio_delete" | "bdev_uring_delete" => json!({ "name": "free" }),
        "bdev_lvol_create_lvstore" => json!({ "bdev_name": "free", "lvs_name": "new" }),
        "bdev_lvol_create" => json!({ "lvol_name": "new", "size_in_mib": 1, "lvs_name": "main" }),
        "bdev_lvol_snapshot" => json!({ "lvol_name": "main/v", "snapshot_name": "new" }),
        "bdev_lvol_clone" => json!({ "snapshot_name": "main/v@1", "clone_name": "new" }),
        "bdev_lvol_delete" => json!({ "name": "main/v" }),
        "bdev_lvol_resize" => json!({ "name": "main/v", "size_in_mib": 2 }),
        "bdev_lvol_rename" => json!({ "old_name": "main/v", "new_name": "new" }),
        "bdev_lvol_delete_lvstore" => json!({ "lvs_name": "main" }),
        name => {
            assert!(!method.params.iter().any(|param| param.required), "{name} has no example here");
            json!({})
        }
    };
    params.as_object().unwrap().clone()
}

/// JSON texts of every type, and the edges of each.
fn values() -> Vec<String> {
    let long = format!("\"{}\"", "x".repeat(1 << 20));
    let mut values: Vec<String> = [
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "1.5",
        "18446744073709551616",
        "1e400",
        r#""""#,
        r#""text""#,
        r#""a\u0000b""#,
        r#""a\nb""#,
        r#""\ud800""#,
        "[]",
        "[[]]",
        "{}",
        r#"{"zz":1}"#,
    ]
    .map(str::to_owned)
    .to_vec();
    values.push(long);
    values
}

/// Whether a parameter of this type can be `value`, judged apart from the code under test.
fn may_be(param: &Param, value: &str) -> bool {
    if value == "null" {
        return !param.required;
    }
    let within = |low: i128, high: i128| value.parse::<i128>().is_ok_and(|v| (low..=high).contains(&v));
    match param.kind {
        Kind::Bool => value == "true" || value == "false",
        Kind::Off => value == "false",
        Kind::Unsupported | Kind::Nqn | Kind::Uuid | Kind::Address | Kind::Hex { .. } => false,
        Kind::Unsigned { min, max } => within(min.into(), max.into()),
        Kind::Signed { min, max } => within(min.into(), max.into()),
        Kind::Choice(numbers) => numbers.iter().any(|number| number.to_string() == value),
        Kind::Text { .. } | Kind::Ascii { .. } | Kind::Name | Kind::Node => value == r#""text""#,
        Kind::OneOf(words) => words.iter().any(|word| format!("\"{word}\"") == value),
        Kind::Object(members) => value == "{}" && !members.iter().any(|member| member.required),
        Kind::List { .. } => value == "[]",
    }
}

/// The text of parameters in which the one at `path` is `value`.
fn with(example: &Map<String, Value>, path: &[&str], value: &str) -> String {
    const MARK: &str = "the value under test";
    let mut params = Value::Object(example.clone());
    let mut place = &mut params;
    for name in path {
        place = &mut place[*name];
    }
    *place = json!(MARK);
    params.to_string().replacen(&format!("\"{MARK}\""), value, 1)
}

/// Every parameter, those of objects included, with its path.
fn every_param(params: &'static [Param], path: &[&'static str]) -> Vec<(Vec<&'static str>, &'static Param)> {
    let mut all = Vec::new();
    for param in params {
        let own = [path, &[param.name]].concat();
        if let Kind::Object(members) = param.kind {
            all.extend(every_param(members, &own));
        }
        all.push((own, param));
    }
    all
}

/// Makes calls over one connection, and checks the form of each answer.
struct Caller<'a> {
    daemon: &'a Daemon,
    client: Client,
    calls: u64,
    slowest: (Duration, String),
}

impl<'a> Caller<'a> {
    fn new(daemon: &'a Daemon) -> Caller<'a> {
        Caller { daemon, client: daemon.client(), calls: 0, slowest: Default::default() }
    }

    /// The error object, or the result in `Ok`.
    fn call(&mut self, method: &str, params: Option<&str>) -> Result<Value, Value> {
        self.calls += 1;
        let id = match self.calls % 2 {
            0 => json!(self.calls),
            _ => json!(format!("call {}", self.calls)),
        };
        let members = params.map(|params| format!(r#","params":{params}"#)).unwrap_or_default();
        let started = Instant::now();
        self.client.send(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"{members}}}"#).as_bytes());
        let answer = self.client.receive();
        let shown = format!("{method} {:.120}", members);
        assert!(started.elapsed() < CALL_MAX, "{shown} took {:?}", started.elapsed());
        if started.elapsed() > self.slowest.0 {
            self.slowest = (started.elapsed(), shown.clone());
        }
        assert_eq!((&answer["jsonrpc"], &answer["id"]), (&json!("2.0"), &id), "{shown}: {answer}");
        let members = answer.as_object().unwrap();
        assert_eq!(members.len(), 3, "{shown}: {answer}");
        let Some(error) = members.get("error") else { return Ok(members["result"].clone()) };
        assert!(
            answer.to_string().len() <= REFUSAL_MAX,
            "{shown}: a refusal of {} bytes",
            answer.to_string().len()
        );
        let known = ["code", "message", "data"];
        assert!(
            error.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())),
            "{shown}: {error}"
        );
        assert!(error["code"].as_i64().is_some_and(|code| code < 0), "{shown}: {error}");
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{shown}: {error}");
        assert!(error["data"].is_object() || error.get("data").is_none(), "{shown}: {error}");
        Err(error.clone())
    }

    fn refused(&mut self, method: &str, params: Option<&str>, field: Option<&str>) {
        let shown = format!("{method} {:.120}", params.unwrap_or("without parameters"));
        match self.call(method, params) {
            Ok(result) => panic!("{shown} gave {result}"),
            Err(error) => {
                assert_eq!(error["code"], -32602, "{shown}: {error}");
                let said = error["data"]["field"].as_str().unwrap_or_else(|| panic!("{shown}: {error}"));
                assert!(field.is_none_or(|field| said.starts_with(field)), "{shown}: {error}");
                assert!(error["data"]["reason"].as_str().is_some_and(|r| !r.is_empty()), "{shown}: {error}");
            }
        }
    }
}

#[test]
fn wrong_parameters_of_every_method_are_refused_and_change_nothing() {
    let mut daemon = Daemon::start();
    let port = free_port();
    prepare(&daemon, port);
    let before = state(&daemon);
    let mut caller = Caller::new(&daemon);
    let values = values();
    for method in table::all() {
        let example = example(method, port);
        for params in ["[]", "[1]", "5", "-1", "1e400", "\"text\"", "true", values.last().unwrap()] {
            caller.refused(method.name, Some(params), Some("params"));
        }
        if method.params.iter().any(|param| param.required) {
            for params in [None, Some("null"), Some("{}")] {
                caller.refused(method.name, params, None);
            }
        }
        let long = "x".repeat(1 << 20);
        for unknown in ["no_such_parameter", "", "a\\u0000b", "a\\nb", &long] {
            let mut params = Value::Object(example.clone()).to_string();
            params.pop();
            params.push_str(if example.is_empty() { "" } else { "," });
            params.push_str(&format!("\"{unknown}\":1}}"));
            caller.refused(method.name, Some(&params), None);
        }
        for (path, param) in every_param(method.params, &[]) {
            for value in values.iter().filter(|value| !may_be(param, value)) {
                caller.refused(method.name, Some(&with(&example, &path, value)), Some(&path.join(".")));
            }
            if let Kind::List { of, max } = param.kind {
                let element = Param { name: "element", kind: *of, required: true, doc: "" };
                for value in values.iter().filter(|value| !may_be(&element, value)) {
                    caller.refused(
                        method.name,
                        Some(&with(&example, &path, &format!("[{value}]"))),
                        Some(path[0]),
                    );
                }
                let many = format!("[{}0]", "0,".repeat(max));
                caller.refused(method.name, Some(&with(&example, &path, &many)), Some(path[0]));
            }
            let mut twice = with(&example, &path[..1], "null");
            twice.pop();
            twice.push_str(&format!(",\"{}\":null}}", path[0]));
            caller.refused(method.name, Some(&twice), Some(path[0]));
        }
        assert_eq!(state(caller.daemon), before, "after {}", method.name);
    }
    println!("{} calls; the slowest took {:?}: {}", caller.calls, caller.slowest.0, caller.slowest.1);
    daemon.assert_alive();
    assert!(daemon.signal(Signal::SIGTERM).success(), "{}", daemon.log());
}

/// What the declarations allow but the calls may not like: zeros, empty lists, other names, what is left out.
#[test]
fn edges_that_the_declarations_allow_get_an_answer_of_the_right_form() {
    let mut daemon = Daemon::start();
    let port = free_port();
    prepare(&daemon, port);
    let mut caller = Caller::new(&daemon);
    let values = values();
    let (mut made, mut refused) = (0, 0);
    for method in table::all() {
        let example = example(method, port);
        let mut edges = vec![None];
        for (path, param) in every_param(method.params, &[]) {
            // A wait of a minute is as it should be.
            if method.name == "bdev_get_bdevs" && param.name == "timeout" {
                continue;
            }
            edges.extend(values.iter().filter(|v| may_be(param, v)).map(|v| Some(with(&example, &path, v))));
        }
        if !method.params.iter().any(|param| param.required) {
            edges.extend([Some("null".to_owned()), Some("{}".to_owned())]);
        }
        edges.push(Some(Value::Object(example).to_string()));
        for params in edges {
            match caller.call(method.name, params.as_deref()) {
                Err(_) => refused += 1,
                Ok(_) if method.only_reads() => made += 1,
                Ok(_) => {
                    made += 1;
                    clear(&daemon);
                    prepare(&daemon, port);
                }
            }
        }
    }
    println!(
        "{made} calls made, {refused} refused; the slowest took {:?}: {}",
        caller.slowest.0, caller.slowest.1
    );
    daemon.assert_alive();
    clear(&daemon);
    assert!(daemon.signal(Signal::SIGTERM).success(), "{}", daemon.log());
}

#[test]
fn long_and_strange_method_names_are_refused_in_few_words() {
    let mut daemon = Daemon::start();
    let mut caller = Caller::new(&daemon);
    for name in ["", "x", "a\\u0000b", "volume_create\\n", &"x".repeat(1 << 20), &"volume_".repeat(1 << 17)] {
        let error = caller.call(name, Some("{}")).expect_err("no such method");
        assert_eq!(error["code"], -32601, "{name:.40}: {error}");
    }
    daemon.assert_alive();
}
