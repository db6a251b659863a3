//! A timeline as a trace that browsers show.

use serde_json::{Value, json};

use super::{Span, Timeline};

pub(super) fn write(timeline: &Timeline) -> String {
    let mut events = Vec::new();
    let mut ctas: Vec<u32> = timeline.engines.iter().map(|track| track.cta).collect();
    ctas.dedup();
    for cta in ctas {
        events.push(named("process_name", cta, 0, format!("{}, cta {cta}", timeline.kernel)));
        let roles = timeline.roles.iter().map(|track| (track.cta, track.name.clone(), &track.spans));
        let engines =
            timeline.engines.iter().map(|track| (track.cta, track.engine.to_string(), &track.spans));
        let tracks = roles.chain(engines).filter(|(of, ..)| *of == cta);
        for (thread, (_, name, spans)) in tracks.enumerate() {
            let thread = thread as u32 + 1;
            events.push(named("thread_name", cta, thread, name));
            events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": cta, "tid": thread, "args": {"sort_index": thread}}));
            events.extend(spans.iter().map(|span| event(timeline, span, cta, thread)));
        }
    }
    let about = "model, not measurement; a microsecond is a cycle";
    json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": about}}).to_string()
}

fn named(what: &str, process: u32, thread: u32, name: String) -> Value {
    json!({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})
}

fn event(timeline: &Timeline, span: &Span, process: u32, thread: u32) -> Value {
    json!({
        "ph": "X",
        "name": timeline.describe(span),
        "ts": span.start,
        "dur": span.end - span.start,
        "pid": process,
        "tid": thread,
        "args": {"line": span.line.to_string(), "warpgroup": span.warpgroup},
    })
}
