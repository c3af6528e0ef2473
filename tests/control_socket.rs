//! The control socket as hostile and clumsy clients use it, against the real binary.
#![forbid(unsafe_code)]

mod daemon;

use daemon::{Daemon, PATIENCE, rimrock};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const VERSION: &str = r#"{"jsonrpc":"2.0","method":"spdk_get_version","id":1}"#;

fn errors(text: &str) -> Vec<i64> {
    text.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["error"]["code"].as_i64().unwrap_or(0))
        .collect()
}

#[test]
fn requests_are_cut_apart_wherever_the_stream_is_split() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    // Byte by byte, with a character of several bytes and a long number as the id.
    let request =
        r#"{"jsonrpc":"2.0","method":"spdk_get_version","id":"ü😀"}{"method":"rpc_get_methods","id":123456}"#;
    for byte in request.as_bytes().chunks(1) {
        client.send(byte);
    }
    assert_eq!(client.receive()["id"], "ü😀");
    assert_eq!(client.receive()["id"], 123_456);
    // Three in one write, pretty-printed, with nothing, a blank and a newline between them.
    let pretty = serde_json::to_string_pretty(&serde_json::from_str::<Value>(VERSION).unwrap()).unwrap();
    client.send(format!("{pretty}{VERSION} {pretty}\n").as_bytes());
    for _ in 0..3 {
        assert!(client.receive()["result"]["version"].as_str().unwrap().starts_with("Rimrock v"));
    }
}

#[test]
fn long_requests_are_answered_and_too_long_ones_refused_without_a_reset() {
    let mut daemon = Daemon::start();
    for length in [31 << 10, 33 << 10, 1 << 20] {
        let mut client = daemon.client();
        let id = "x".repeat(length);
        client.send(format!(r#"{{"method":"spdk_get_version","id":"{id}"}}"#).as_bytes());
        assert_eq!(client.receive()["id"].as_str().unwrap().len(), length);
    }
    let mut client = daemon.client();
    let mut sender = UnixStream::try_clone(&client.stream).unwrap();
    let writer = std::thread::spawn(move || {
        use std::io::Write;
        let chunk = vec![b'x'; 1 << 20];
        sender.write_all(b"{\"id\":\"").unwrap();
        for _ in 0..64 {
            sender.write_all(&chunk).expect("a client that sends before it reads is not cut off");
        }
        sender.shutdown(Shutdown::Write).unwrap();
    });
    let answer: Value = serde_json::from_str(client.receive_to_end().trim()).unwrap();
    writer.join().unwrap();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&Value::Null, &json!(-32600)), "{answer}");
    daemon.assert_alive();
}

#[test]
fn garbage_gets_an_error_object_and_harms_nobody_else() {
    let mut daemon = Daemon::start();
    let mut bystander = daemon.client();
    let deep = "[".repeat(100_000);
    let deep_object = "{\"a\":".repeat(100_000);
    for (bytes, code) in [
        (&b"hello"[..], -32700),
        (b"{\"a\":}", -32700),
        (b"\0", -32700),
        (b"\xef\xbb\xbf{}", -32700),
        (b"{\"method\":\"\xff\xfe\",\"id\":1}", -32700),
        (b"{\"method\":\"spdk_get_version\",\"id\":1", -32700),
        (b"{\"method\":\"spdk_get_version\",\"id\":01}", -32700),
        (b"42", -32600),
        (b"\"spdk_get_version\"", -32600),
        (deep.as_bytes(), -32600),
        (deep_object.as_bytes(), -32600),
        (b"[]", -32600),
        (b"{}", -32600),
        (b"[1]", -32600),
    ] {
        let mut client = daemon.client();
        client.send(VERSION.as_bytes());
        // A refused stream may be closed while the rest of it is being sent.
        let _ = std::io::Write::write_all(&mut client.stream, bytes);
        let _ = client.stream.shutdown(Shutdown::Write);
        let text = client.receive_to_end();
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]);
        let (first, second) = text.split_once('\n').unwrap_or_else(|| panic!("{shown}: {text}"));
        assert!(first.contains("Rimrock"), "{shown}: what came before is answered");
        let answer: Value = serde_json::from_str(second.trim()).unwrap();
        let answer = if answer.is_array() { answer[0].clone() } else { answer };
        assert_eq!(
            (&answer["error"]["code"], &answer["id"]),
            (&json!(code), &Value::Null),
            "{shown}: {answer}"
        );
        assert!(bystander.call("spdk_get_version", Value::Null)["result"].is_object());
    }
    daemon.assert_alive();
}

#[test]
fn junk_between_requests_ends_the_stream_after_the_answers_before_it() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    client.send(format!("{VERSION}{VERSION},{VERSION}").as_bytes());
    assert_eq!(errors(&client.receive_to_end()), [0, 0, -32700]);
}

#[test]
fn errors_of_calls_leave_the_connection_open() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    client.send(br#"{"method":"zz","id":5}{"method":"spdk_get_version","id":true}{"method":5,"id":6}"#);
    client.send(VERSION.as_bytes());
    let answers: Vec<Value> = (0..4).map(|_| client.receive()).collect();
    assert_eq!((&answers[0]["error"]["code"], &answers[0]["id"]), (&json!(-32601), &json!(5)));
    assert_eq!((&answers[1]["error"]["code"], &answers[1]["id"]), (&json!(-32600), &Value::Null));
    assert_eq!((&answers[2]["error"]["code"], &answers[2]["id"]), (&json!(-32600), &json!(6)));
    assert!(answers[3]["result"].is_object());
}

#[test]
fn a_client_that_closes_its_sending_side_still_gets_everything() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    // A slow call: it waits for a bdev that never comes.
    client.send(br#"{"id":1,"method":"bdev_get_bdevs","params":{"name":"nothing","timeout":300}}"#);
    client.send(VERSION.as_bytes());
    client.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(errors(&client.receive_to_end()), [-110, 0]);
}

#[test]
fn a_slow_call_holds_up_no_other_connection() {
    let daemon = Daemon::start();
    let mut slow = daemon.client();
    slow.send(br#"{"id":1,"method":"bdev_get_bdevs","params":{"name":"nothing","timeout":1500}}"#);
    let started = Instant::now();
    daemon.call("device_list", Value::Null);
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
    assert_eq!(slow.receive()["error"]["code"], -110);
}

#[test]
fn ids_are_echoed_byte_for_byte() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    let long = format!("\"{}\"", "x".repeat(65536));
    for id in [
        "2147483648",
        "9007199254740993",
        "9223372036854775808",
        "18446744073709551615",
        "1e20",
        "1.5",
        "-1",
        "\"\"",
        "\"\\u0041\"",
        &long,
        "null",
    ] {
        client.send(format!(r#"{{"method":"zz","id":{id}}}"#).as_bytes());
        let mut text = Vec::new();
        while text.last() != Some(&b'\n') {
            let mut byte = [0];
            std::io::Read::read_exact(&mut client.stream, &mut byte).unwrap();
            text.push(byte[0]);
        }
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error""#)), "{text}");
    }
}

#[test]
fn batches_and_notifications_follow_the_specification() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    client.send(br#"{"method":"spdk_get_version"}"#);
    client.send(br#"[{"method":"spdk_get_version"},{"method":"zz"}]"#);
    client.send(
        br#"[{"method":"spdk_get_version","id":1},{"method":"spdk_get_version"},7,{"method":"zz","id":"b"}]"#,
    );
    let batch = client.receive();
    let ids: Vec<&Value> = batch.as_array().unwrap().iter().map(|answer| &answer["id"]).collect();
    assert_eq!(ids, [&json!(1), &Value::Null, &json!("b")]);
    assert_eq!(batch[1]["error"]["code"], -32600);
}

#[test]
fn out_of_range_numbers_are_not_rounded_into_range() {
    let daemon = Daemon::start();
    for number in ["18446744073709551616", "1e400", "1e3", "4096.0", "-0.5", "\"4096\"", "0"] {
        let mut client = daemon.client();
        let params = format!(r#"{{"name":"m","block_size":4096,"num_blocks":{number}}}"#);
        client.send(format!(r#"{{"id":1,"method":"bdev_malloc_create","params":{params}}}"#).as_bytes());
        let error = client.receive()["error"].clone();
        assert_eq!(
            (&error["code"], &error["data"]["field"]),
            (&json!(-32602), &json!("num_blocks")),
            "{number}"
        );
    }
    let huge = json!({ "name": "m", "block_size": 4096, "num_blocks": u64::MAX });
    assert_eq!(daemon.refused("bdev_malloc_create", huge)["data"]["field"], "num_blocks");
    assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
}

#[test]
fn text_of_every_kind_comes_back_as_strict_json() {
    let daemon = Daemon::start();
    for name in ["quote\"", "back\\slash", "\u{1}", "\u{2028}", "😀", "a/b"] {
        let error = daemon.refused("device_create", json!({ "name": name, "uri": "ram:1MiB" }));
        assert_eq!(error["data"]["field"], "name", "{name:?}: {error}");
    }
    let mut client = daemon.client();
    client.send(br#"{"id":1,"method":"device_create","params":{"name":"\ud800","uri":"ram:1MiB"}}"#);
    let error = client.receive()["error"].clone();
    assert_eq!((&error["code"], &error["data"]["field"]), (&json!(-32602), &json!("name")));
    let uri = "uring:/nowhere/quote\"back\\slash\u{2028}😀.img";
    let error = daemon.refused("device_create", json!({ "name": "d", "uri": uri }));
    assert!(error["message"].as_str().unwrap().contains("😀"), "{error}");
}

#[test]
fn the_socket_is_private_and_belongs_to_one_daemon() {
    let mut daemon = Daemon::start();
    let mode = std::fs::metadata(daemon.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = rimrock().arg("--socket").arg(daemon.socket()).arg("serve").output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains("another Rimrock already answers"), "{text}");
    daemon.assert_alive();

    // Killed, it leaves its socket behind; the next one takes over.
    daemon.signal(Signal::SIGKILL);
    assert!(daemon.socket().exists());
    daemon.restart();
    assert!(daemon.signal(Signal::SIGINT).success());
    assert!(!daemon.socket().exists(), "a clean stop removes the socket");

    // Somebody's file at the path is left alone.
    std::fs::write(daemon.socket(), "precious").unwrap();
    let refused = rimrock().arg("--socket").arg(daemon.socket()).arg("serve").output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(daemon.socket()).unwrap(), "precious");
}

#[test]
fn many_connections_are_served_at_once_and_one_too_many_is_told() {
    let daemon = Daemon::start();
    let mut clients: Vec<_> = (0..200).map(|_| daemon.client()).collect();
    for client in &mut clients {
        client.send(VERSION.as_bytes());
    }
    for client in &mut clients {
        assert!(client.receive()["result"].is_object());
    }
    let mut more: Vec<_> = (0..100).map(|_| daemon.client()).collect();
    let answer: Value = serde_json::from_str(more.pop().unwrap().receive_to_end().trim()).unwrap();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&Value::Null, &json!(-11)));
    drop((clients, more));
    let started = Instant::now();
    while daemon.client().call("spdk_get_version", Value::Null)["result"].is_null() {
        assert!(started.elapsed() < PATIENCE);
    }
}
