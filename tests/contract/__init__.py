"""PyTorch's tests of its launcher as black-box tests of both launchers: commands, files and exit codes.

Where torchrun is known to be broken, a test runs with raylaunch only and says why. The table maps each of PyTorch's
tests -> the tests here, both without `test_`; a shortened name here still identifies one test. Where there is none, a
word says why: `internal`, it looks at objects inside torchrun that another launcher does not have; `devices`, it needs
GPUs or XPUs; `tests/...`, it is tested there; `no roles`, a job has one role; `no barrier`, the driver knows when all
workers have finished.

test/distributed/launcher/test_run.py
    launch_user_script_python                    -> every_rank_runs_once[static], values_of_a_single_node
    launch_user_script_python_caffe2_bc          -> every_rank_runs_once[static], a_given_master_address_and_port
    launch_user_script_bash                      -> every_rank_runs_once[command],
                                                    what_makes_no_sense[command and module]
    launch_user_script_default_nproc             -> a_lone_worker_is_the_default
    launch_with_env_vars                         -> every_rank_runs_once[command], the_command_line_wins,
                                                    what_makes_no_sense[command and module from the environment]
    nproc_launch_auto_configurations             -> what_makes_sense_is_taken[nproc auto], a_worker_for_each_cpu
    nproc_launch_number_configurations           -> torchrun_takes_what_makes_sense, every_rank_runs_once
    nproc_launch_unknown_configurations          -> what_makes_no_sense[unknown word for nproc]
    nproc_gpu_launch_configurations, nproc_xpu_... -> devices
    launch_elastic                               -> an_elastic_job_starts_with_the_nodes_that_are_there
    launch_elastic_worker_raise_exception        -> the_exit_code_is_1[raise]; its one event: internal
    launch_elastic_agent_raise_exception         -> internal
    launch_standalone, launch_run_path           -> every_rank_runs_once[standalone]
    launch_elastic_multiple_agents               -> every_rank_runs_once[two nodes]
    min_max_nodes_parse                          -> what_makes_sense_is_taken[from two to twenty],
                                                    what_makes_no_sense[nnodes of three parts]
    launch_shutdown                              -> internal
    is_torchelastic_launched, ..._with_logs_spec_defined
                                                 -> torch_knows_that_it_was_launched
    is_not_torchelastic_launched                 -> internal (no launcher takes part)
    logs_logs_spec_entrypoint_must_be_defined    -> what_makes_no_sense[unknown logs specs]
    init_method_env_with_torchelastic            -> all_ranks_sum_up[env]
    init_method_tcp_with_torchelastic            -> all_ranks_sum_up[tcp]
    capture_logs_using_default_logs_specs        -> tee_writes_to_files_and_to_the_terminal
    virtual_local_rank                           -> a_virtual_local_rank_is_0; compiled code of two GPUs: devices

test/distributed/launcher/launch_test.py
    launch_without_env, launch_with_env          -> the_local_rank_comes_first_if_asked_for

test/distributed/launcher/api_test.py
    launch_script_python, ..._local_rank_transfer, launch_script_bash, launch_elastic, launch_elastic_multiple_agents,
    launch_elastic_worker_raise_exception        -> as in test_run.py
    launch_function                              -> a_function_gives_its_results_by_rank
    launch_dist_sum_with_static_rdzv             -> all_ranks_sum_up[env], a_given_master_address_and_port
    launch_elastic_agent_raise_exception, launch_shutdown, get_entrypoint_name, rdzv_handler_shutdown_on_agent_signal,
    rdzv_handler_shutdown_on_agent_error         -> internal

test/distributed/launcher/test_api.py
    launch_agent_sets_signals_env_var, launch_agent_default_signals
                                                 -> signals_to_handle_are_told
    launch_agent_failing_rdzv_shutdown_...       -> internal

test/distributed/elastic/agent/server/test/local_elastic_agent_test.py (families; there for each rendezvous backend)
    run_check_env_function                       -> every_variable_is_there
    run_check_nccl_async_error_handling_env(_default)
                                                 -> nccl_async_error_handling_is_on_unless_said_otherwise
    check_master_addr_port_override              -> a_given_master_address_and_port_are_taken
    local_watchdog_setup_enabled, ..._disabled   -> a_timer_file_is_visible_if_timers_are_enabled
    healthcheck_setup                            -> a_health_check_port_is_visible_if_it_was_set
    simple_dist_sum                              -> all_ranks_sum_up[env]
    distributed_sum_homogeneous                  -> values_of_two_nodes, all_ranks_sum_up[env]
    distributed_sum_with_custom_log_lines        -> tee_writes_to_files_and_to_the_terminal
    distributed_sum_heterogeneous                -> tests/cluster (unequal nodes need a job file)
    correct_rank_assignment_homogeneous          -> values_of_two_nodes
    correct_rank_assignment_heterogeneous        -> no roles
    run_sad_function                             -> the_exit_code_is_1[raise], the_parent_gets_a_copy_of_the_root_cause
    run_bipolar_function                         -> restarts_are_used_up_and_then_the_job_fails
    double_agent_fault_tolerance                 -> a_killed_agent_is_replaced_or_done_without[2]
    double_agent_elastic                         -> a_killed_agent_is_replaced_or_done_without[1:2]
    no_exit_barrier_on_failure                   -> nodes_do_not_wait_for_each_other_when_they_fail
    workers_drift_success                        -> workers_that_finish_early_do_not_end_the_others
    workers_drift_fail                           -> the_exit_code_is_1[late]
    barrier_failed                               -> no barrier
    torch_rpc                                    -> workers_call_each_other
    rank_restart_after_failure                   -> a_worker_that_is_killed_is_started_again
    shutdown_called                              -> internal

test/distributed/elastic/agent/server/test/api_test.py
    restart accounting                           -> restarts_are_used_up_and_then_the_job_fails
    rank tables with several roles               -> no roles; with one: tests/core
    all others                                   -> internal

test/distributed/elastic/agent/server/test/shutdown_timeout_test.py
    launch_config_default, _custom, _env_var_shutdown_timeout, launch_config_explicit_overrides_env,
    shutdown_timeout_zero                        -> the_shutdown_timeout_is_30_unless_said_otherwise,
                                                    torchrun_takes_what_makes_sense[... shutdown timeout ...]
    shutdown_timeout_validation_negative         -> what_makes_no_sense[negative shutdown timeout]
    local_elastic_agent_receives_shutdown_timeout -> workers_that_do_not_listen_are_killed_with_their_children
    simple_elastic_agent_..., pcontext_..., shutdown_method_...
                                                 -> internal

test/distributed/elastic/multiprocessing/api_test.py
    from_value, from_value_map                   -> what_makes_sense_is_taken, torchrun_takes_what_makes_sense
    from_str_bad_input                           -> what_makes_no_sense[--tee ..., -r ...]
    to_map                                       -> each_local_rank_has_its_own_rule
    invalid_log_dir                              -> what_makes_no_sense[log folder that is a file]
    binary, function, wrap_bad, binary_redirect_and_tee, function_redirect_and_tee
                                                 -> redirects_write_to_files_alone, each_local_rank_has_its_own_rule
    binary_exit                                  -> a_workers_exit_code_is_in_the_report
    function_exit                                -> a_workers_exit_code_is_in_the_report, an_exit_is_no_exception
    binary_signal                                -> a_signal_is_named_in_the_report
    binary_raises, function_raise                -> an_exception_is_in_the_error_file,
                                                    the_others_are_ended_with_their_children
    binary_incorrect_entrypoint                  -> a_program_that_is_not_there
    no_zombie_process_binary                     -> no_process_is_left[SIGTERM, SIGINT, SIGHUP, SIGQUIT]
    no_zombie_process_function                   -> no_process_is_left[run as a path]
    void_function, function_large_ret_val, function_with_tensor
                                                 -> tests/cluster (results of functions)
    is_failed, get_failures, args_env_len_mismatch, pcontext_wait, ..._context_close, validate_full_rank,
    multiprocessing_context_poll_raises_exception -> internal

test/distributed/elastic/multiprocessing/test_api.py
    start_registers_default_signals              -> workers_get_the_signal_that_the_launcher_got[SIGTERM ... SIGQUIT]
    start_registers_custom_signals, start_supports_sigusr1_and_sigusr2
                                                 -> workers_get_the_signal_that_the_launcher_got[SIGUSR1]
    start_handles_invalid_signals                -> an_unknown_signal_is_warned_of
    terminate_process_handler                    -> the_exit_code_tells_of_the_signal
    start_not_main_thread, start_handles_windows_signals
                                                 -> internal

test/distributed/elastic/multiprocessing/errors/api_test.py
    process_failure, record                      -> an_exception_is_in_the_error_file, the_report_of_an_exception
    process_failure_new_format, process_mast_error_format
                                                 -> the_flat_form_of_an_error_file
    failure_incorrect_reply_file                 -> an_error_file_that_cannot_be_read
    process_failure_signal, child_failed_error_signal_name_in_message
                                                 -> a_signal_is_named_in_the_report
    process_failure_no_error_file                -> a_worker_with_no_error_file, a_workers_exit_code_is_in_the_report
    child_failed_error                           -> the_report_of_an_exception, who_was_ended_by_us
    record_system_exit, record_system_exit_erronr -> an_exit_is_no_exception
    record_child_failure                         -> the_parent_gets_a_copy_of_the_root_cause
    record_child_failure_no_child_error_file     -> a_worker_with_no_error_file
    record_no_error_file, record_good_fn         -> internal (no launcher takes part)

test/distributed/elastic/multiprocessing/tail_log_test.py
    tail                                         -> the_files_of_32_workers_have_all_their_lines,
                                                    the_terminal_has_all_lines_of_32_workers
    tail_write_to_dst_file, tail_with_custom_filter -> lines_that_match_a_filter_are_copied
    tail_with_custom_prefix                      -> tee_writes_to_files_and_to_the_terminal
    tail_no_files, tail_logfile_never_generates, tail_logfile_error_in_tail_fn
                                                 -> internal

test/distributed/elastic/rendezvous/static_rendezvous_test.py
    missing_port, empty_endpoint                 -> an_endpoint_that_leads_nowhere
    ipv6_addr, ipv6_addr_localhost, get_backend, static_rdzv_multiple_calls
                                                 -> internal

test/distributed/elastic/rendezvous/dynamic_rendezvous_test.py
    all                                          -> internal
"""
