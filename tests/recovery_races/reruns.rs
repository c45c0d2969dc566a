//! Runs that follow one another: how many, and what the next one knows of the last.

use super::*;

/// A run that saves its step, or finds that the one before it has done so, and how it ends.
async fn step(
    app: &Router,
    puppet: &mut Puppet,
    how: &str,
    number: u32,
) -> (JoinHandle<Answer>, Run) {
    let sent = spawn(app, post(how, "A"));
    let run = puppet.next().await;
    let saved = run.owner().checkpointed::<u32>("step").await.unwrap();
    assert_eq!(saved, (number > 1).then_some(7), "{how}, run {number}");
    run.owner().checkpoint("step", &7_u32).await.unwrap();
    (sent, run)
}

every_store! {
    async fn a_run_that_is_continued_reads_what_was_saved_however_the_last_one_ended(world: World) {
        for how in ["abandoned", "released", "panicked", "freed", "gone"] {
            let store = world.open().await;
            let mut layer = layer(&store).recovery(Recovery::rerun());
            if how == "freed" {
                layer = layer.resolver(|_: Abandoned| async { Verdict::DidNotHappen });
            }
            let (app, mut puppet) = puppet_app(&layer);
            let (sent, run) = step(&app, &mut puppet, how, 1).await;
            if how == "gone" {
                sent.abort();
            }
            match how {
                "released" => run.answers(429, "later"),
                "panicked" => run.panics("as the test wants"),
                _ => run.answers_with(abandons()),
            }
            match how {
                "gone" => comes_to(&store, how, Some(State::Abandoned)).await,
                _ => assert_ne!(sent.await.unwrap().status, 201, "{how}"),
            }
            let (sent, run) = step(&app, &mut puppet, how, 2).await;
            run.answers(201, "ok");
            assert_eq!(sent.await.unwrap().status, 201, "{how}");
        }
    }

    async fn runs_that_are_cut_off_are_bounded_also_where_others_answer_in_between(world: World) {
        let store = world.open().await;
        let (app, mut puppet) = puppet_app(&layer(&store).recovery(Recovery::rerun()));
        let mut panics = 0;
        for number in 0..12 {
            let mut sent = spawn(&app, post("k", "A"));
            let run = tokio::select! {
                told = &mut sent => {
                    assert_eq!(told.unwrap().said(), (409, UNKNOWN.to_owned()));
                    break;
                }
                run = puppet.next() => run,
            };
            if number % 2 == 0 {
                panics += 1;
                run.panics("as the test wants");
            } else {
                run.answers_with(abandons());
            }
            assert!(sent.await.unwrap().status.is_server_error());
        }
        assert!((2..=3).contains(&panics), "{panics} panics");
        assert_eq!(told_at_once(&app).await, (409, UNKNOWN.to_owned()));
    }
}
